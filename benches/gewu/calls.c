/*
 * Figures of the C ABI, one "name value unit" line each: gewu MODEL fake|real.
 * fake: what the library and the daemon cost; the fake engine must run unlimited.
 * real: time to first token alone, in a second session, and beside background work; how long background work waits.
 */
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <qos/qos.h>

enum { ROUNDS = 1000, MANY = 100, BACKGROUND_JOBS = 4, TTFT_ROUNDS = 5, LONG_WORDS = 1500, DESTROYED = 8 };
enum { STREAMED_TOKENS = 9, BUSY_S = 25, BUSY_TOKENS = 3000 };

static const char *model;

struct watch {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int num_replies, is_final;
    double first_s, last_s, longest_gap_s;
};

static double now_s(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void on_reply(void *context, const char *response)
{
    struct watch *watch = context;
    pthread_mutex_lock(&watch->lock);
    double time_s = now_s();
    if (watch->num_replies++ == 0) {
        watch->first_s = time_s;
    } else if (time_s - watch->last_s > watch->longest_gap_s) {
        watch->longest_gap_s = time_s - watch->last_s;
    }
    watch->last_s = time_s;
    watch->is_final |= strstr(response, "\"finish_reason\":null") == NULL;
    pthread_cond_signal(&watch->changed);
    pthread_mutex_unlock(&watch->lock);
}

static void watch_init(struct watch *watch)
{
    memset(watch, 0, sizeof *watch);
    pthread_mutex_init(&watch->lock, NULL);
    pthread_cond_init(&watch->changed, NULL);
}

static void wait_for(struct watch *watch, int num_replies)
{
    pthread_mutex_lock(&watch->lock);
    while (watch->num_replies < num_replies && !watch->is_final) {
        pthread_cond_wait(&watch->changed, &watch->lock);
    }
    pthread_mutex_unlock(&watch->lock);
}

static void die(const char *what, int error)
{
    fprintf(stderr, "%s: %d\n", what, error);
    exit(1);
}

static OH_QoS_GewuSession create(const char *qos)
{
    char attributes[4200];
    snprintf(attributes, sizeof attributes, "{\"model\": \"%s\", \"qos\": \"%s\"}", model, qos);
    OH_QoS_GewuCreateSessionResult result = OH_QoS_GewuCreateSession(attributes);
    if (result.error != OH_QOS_GEWU_OK) {
        die("create", (int)result.error);
    }
    return result.session;
}

static OH_QoS_GewuRequest submit(OH_QoS_GewuSession session, const char *content, int max_tokens, struct watch *watch)
{
    size_t size = strlen(content) + 200;
    char *json = malloc(size);
    snprintf(json, size, "{\"messages\": [{\"role\": \"user\", \"content\": \"%s\"}], \"stream\": true, \"max_tokens\": %d}",
        content, max_tokens);
    OH_QoS_GewuSubmitRequestResult result = OH_QoS_GewuSubmitRequest(session, json, on_reply, watch);
    free(json);
    if (result.error != OH_QOS_GEWU_OK) {
        die("submit", (int)result.error);
    }
    return result.request;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(const char *name, double *times_s, int count)
{
    qsort(times_s, (size_t)count, sizeof *times_s, compare);
    printf("%s_p50 %.3f ms\n%s_p99 %.3f ms\n", name, 1e3 * times_s[count / 2], name, 1e3 * times_s[count * 99 / 100]);
}

static void bench_create(void)
{
    static double create_s[ROUNDS], destroy_s[ROUNDS];
    OH_QoS_GewuDestroySession(create("default"));
    for (int i = 0; i < ROUNDS; i++) {
        double start_s = now_s();
        OH_QoS_GewuSession session = create("default");
        create_s[i] = now_s() - start_s;
        start_s = now_s();
        OH_QoS_GewuDestroySession(session);
        destroy_s[i] = now_s() - start_s;
    }
    report("create", create_s, ROUNDS);
    report("destroy", destroy_s, ROUNDS);
}

static void bench_many(void)
{
    OH_QoS_GewuSession sessions[MANY];
    double start_s = now_s();
    for (int i = 0; i < MANY; i++) {
        sessions[i] = create("default");
    }
    printf("create_100_sessions %.3f ms\n", 1e3 * (now_s() - start_s));
    for (int i = 0; i < MANY; i++) {
        OH_QoS_GewuDestroySession(sessions[i]);
    }
}

static void bench_reply(void)
{
    static double first_s[ROUNDS], delta_s[ROUNDS], abort_s[ROUNDS];
    OH_QoS_GewuSession session = create("default");
    struct watch watch;
    for (int i = 0; i < ROUNDS; i++) {
        watch_init(&watch);
        double start_s = now_s();
        OH_QoS_GewuRequest request = submit(session, "hi", STREAMED_TOKENS, &watch);
        wait_for(&watch, 1);
        first_s[i] = watch.first_s - start_s;
        start_s = now_s();
        OH_QoS_GewuAbortRequest(session, request);
        abort_s[i] = now_s() - start_s;
    }
    for (int i = 0; i < ROUNDS; i++) {
        watch_init(&watch);
        submit(session, "hi", STREAMED_TOKENS, &watch);
        wait_for(&watch, INT_MAX);
        delta_s[i] = (watch.last_s - watch.first_s) / STREAMED_TOKENS;
    }
    report("submit_to_first_reply", first_s, ROUNDS);
    report("streamed_delta", delta_s, ROUNDS);
    report("abort", abort_s, ROUNDS);
    OH_QoS_GewuDestroySession(session);
}

static double median_first_s(OH_QoS_GewuSession session, const char *content)
{
    double times_s[TTFT_ROUNDS];
    for (int i = 0; i < TTFT_ROUNDS; i++) {
        char prompt[200];
        struct watch watch;
        snprintf(prompt, sizeof prompt, "%d %s", rand(), content);  /* a new prefix, so that nothing is cached */
        watch_init(&watch);
        double start_s = now_s();
        submit(session, prompt, 8, &watch);
        wait_for(&watch, 1);
        times_s[i] = watch.first_s - start_s;
        wait_for(&watch, INT_MAX);
    }
    qsort(times_s, TTFT_ROUNDS, sizeof *times_s, compare);
    return times_s[TTFT_ROUNDS / 2];
}

static const char *const question = "Name three large cities of Europe and say one sentence about each of them.";
static const char *const story = "Tell a very long story.";

/* A warm session's first token, and that of a session created after it: a second one costs no load. Returns the first.
 * */
static double bench_sessions(OH_QoS_GewuSession first)
{
    struct watch warm;
    watch_init(&warm);
    double start_s = now_s();
    submit(first, "hi", 4, &warm);
    wait_for(&warm, 1);
    printf("cold_first_token %.1f ms\n", 1e3 * (warm.first_s - start_s));
    wait_for(&warm, INT_MAX);
    double alone_s = median_first_s(first, question);
    OH_QoS_GewuSession second = create("user_interactive");
    double second_s = median_first_s(second, question);
    printf("first_token_alone %.1f ms\nfirst_token_of_second_session %.1f ms\nsecond_session_ratio %.2f x\n",
        1e3 * alone_s, 1e3 * second_s, second_s / alone_s);
    OH_QoS_GewuDestroySession(second);
    return alone_s;
}

static int count_running(struct watch *watches, int count)
{
    int num_running = 0;
    for (int i = 0; i < count; i++) {
        pthread_mutex_lock(&watches[i].lock);
        num_running += !watches[i].is_final;
        pthread_mutex_unlock(&watches[i].lock);
    }
    return num_running;
}

static void bench_interactive(OH_QoS_GewuSession interactive, double alone_s)
{
    static struct watch watches[BACKGROUND_JOBS + 1];
    static char prompt[LONG_WORDS * 6 + 1];
    OH_QoS_GewuSession background[BACKGROUND_JOBS + 1];
    for (int i = 0; i < LONG_WORDS; i++) {
        strcat(prompt, i % 2 ? "word " : "other ");
    }
    for (int i = 0; i <= BACKGROUND_JOBS; i++) {
        watch_init(&watches[i]);
        background[i] = create("background");
        submit(background[i], i == BACKGROUND_JOBS ? prompt : story, 400, &watches[i]);
    }
    wait_for(&watches[0], 1);
    double beside_s = median_first_s(interactive, question);
    printf("background_still_running %d requests\n", count_running(watches, BACKGROUND_JOBS + 1));
    printf("first_token_beside_background %.1f ms\nratio %.2f x\n", 1e3 * beside_s, beside_s / alone_s);
    for (int i = 0; i <= BACKGROUND_JOBS; i++) {
        OH_QoS_GewuDestroySession(background[i]);
    }
}

/* Destroying many sessions with a running request each, and one session with as many queued requests. */
static void bench_destroy(void)
{
    static struct watch watches[2 * DESTROYED];
    OH_QoS_GewuSession sessions[DESTROYED], queue = create("default");
    for (int i = 0; i < DESTROYED; i++) {
        watch_init(&watches[i]);
        sessions[i] = create("default");
        submit(sessions[i], story, 400, &watches[i]);
    }
    for (int i = 0; i < DESTROYED; i++) {
        watch_init(&watches[DESTROYED + i]);
        submit(queue, story, 400, &watches[DESTROYED + i]);
        wait_for(&watches[i], 1);
    }
    wait_for(&watches[DESTROYED], 1);
    printf("destroyed_while_running %d requests\n", count_running(watches, 2 * DESTROYED));
    double start_s = now_s();
    OH_QoS_GewuDestroySession(queue);
    printf("destroy_session_of_8_requests %.3f ms\n", 1e3 * (now_s() - start_s));
    start_s = now_s();
    for (int i = 0; i < DESTROYED; i++) {
        OH_QoS_GewuDestroySession(sessions[i]);
    }
    printf("destroy_8_running_sessions %.3f ms\n", 1e3 * (now_s() - start_s));
}

/* A background answer while interactive ones follow each other without a pause: its longest wait for a token. */
static void bench_starvation(OH_QoS_GewuSession interactive)
{
    static struct watch low, high;
    OH_QoS_GewuSession background = create("background");
    watch_init(&low);
    submit(background, story, BUSY_TOKENS, &low);
    wait_for(&low, 2);
    double start_s = now_s();
    int num_before = low.num_replies;
    while (now_s() - start_s < BUSY_S) {
        watch_init(&high);
        submit(interactive, story, 200, &high);
        wait_for(&high, INT_MAX);
    }
    pthread_mutex_lock(&low.lock);
    double tail_s = now_s() - low.last_s;
    double gap_s = low.longest_gap_s > tail_s ? low.longest_gap_s : tail_s;
    printf("starved_background_tokens %d tokens\nstarved_background_longest_wait %.1f s\n",
        low.num_replies - num_before, gap_s);
    pthread_mutex_unlock(&low.lock);
    OH_QoS_GewuDestroySession(background);
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: %s MODEL fake|real\n", argv[0]);
        return 2;
    }
    model = argv[1];
    if (strcmp(argv[2], "fake") == 0) {
        bench_create();
        bench_many();
        bench_reply();
    } else {
        OH_QoS_GewuSession interactive = create("user_interactive");
        double alone_s = bench_sessions(interactive);
        bench_interactive(interactive, alone_s);
        bench_destroy();
        bench_starvation(interactive);
        OH_QoS_GewuDestroySession(interactive);
    }
    return 0;
}
