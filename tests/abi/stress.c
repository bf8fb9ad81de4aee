/* Random calls from many threads, also inside callbacks: stress MODEL SECONDS. For sanitizers. */
#include <stdatomic.h>
#include <unistd.h>

#include "check.h"

enum { THREADS = 16, SESSIONS = 8, REQUESTS = 4 };

static const char *model;
static double end_s;
static atomic_uint sessions[SESSIONS];
static atomic_uint requests[SESSIONS][REQUESTS];
static atomic_uint num_finals, num_calls;

/* Contexts are not freed: they count replies, and the program checks the numbers. */
struct context {
    atomic_uint num_finals;
};

static void on_reply(void *argument, const char *response)
{
    struct context *context = argument;
    if (strstr(response, "\"finish_reason\":null") == NULL) {
        CHECK_EQUAL(atomic_fetch_add(&context->num_finals, 1), 0);
        atomic_fetch_add(&num_finals, 1);
    }
    if (response[20] % 16 == 0) {
        OH_QoS_GewuAbortRequest(sessions[0], requests[0][0]);
    }
}

static void replace_session(unsigned slot)
{
    OH_QoS_GewuCreateSessionResult result = create(model);
    if (result.error == OH_QOS_GEWU_OK) {
        unsigned old = atomic_exchange(&sessions[slot], result.session);
        OH_QoS_GewuErrorCode error = OH_QoS_GewuDestroySession(old);
        CHECK(error == OH_QOS_GEWU_OK || (error == OH_QOS_GEWU_NOENT));
    } else {
        CHECK(result.error == OH_QOS_GEWU_NOSYS || result.error == OH_QOS_GEWU_FAULT);
    }
}

static void submit_one(unsigned slot, unsigned index, struct context *context)
{
    OH_QoS_GewuSubmitRequestResult result = OH_QoS_GewuSubmitRequest(sessions[slot], STREAMED, on_reply, context);
    if (result.error == OH_QOS_GEWU_OK) {
        requests[slot][index] = result.request;
    } else {
        CHECK(result.request == OH_QOS_GEWU_INVALID_REQUEST_ID);
        CHECK(result.error == OH_QOS_GEWU_NOENT || result.error == OH_QOS_GEWU_NOMEM
            || result.error == OH_QOS_GEWU_FAULT);
    }
}

static void *work(void *argument)
{
    unsigned seed = (unsigned)(size_t)argument;
    enum { CONTEXTS = 20000 };
    struct context *contexts = argument != NULL ? calloc(CONTEXTS, sizeof *contexts) : NULL;
    for (int used = 0; now_s() < end_s && used < CONTEXTS; atomic_fetch_add(&num_calls, 1)) {
        unsigned slot = (unsigned)rand_r(&seed) % SESSIONS, index = (unsigned)rand_r(&seed) % REQUESTS;
        switch (rand_r(&seed) % 8) {
            case 0:
                replace_session(slot);
                break;
            case 1:
            case 2:
                OH_QoS_GewuAbortRequest(sessions[slot], requests[slot][index]);
                break;
            case 3:
                OH_QoS_SetThreadQoS((QoS_Level)(rand_r(&seed) % 6));
                break;
            case 4:
                sleep_s(0.001);
                break;
            default:
                submit_one(slot, index, &contexts[used++]);
        }
    }
    return contexts;
}

int main(int argc, char **argv)
{
    pthread_t threads[THREADS];
    void *contexts[THREADS];
    CHECK(argc == 3);
    model = argv[1];
    end_s = now_s() + atof(argv[2]);
    for (unsigned i = 0; i < SESSIONS; i++) {
        replace_session(i);
    }
    for (size_t i = 0; i < THREADS; i++) {
        CHECK_EQUAL(pthread_create(&threads[i], NULL, work, (void *)(i + 1)), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], &contexts[i]);
    }
    for (unsigned i = 0; i < SESSIONS; i++) {
        OH_QoS_GewuDestroySession(sessions[i]);
    }
    sleep_s(0.2);
    for (int i = 0; i < THREADS; i++) {
        free(contexts[i]);
    }
    printf("%u calls, %u finished requests\n", num_calls, num_finals);
    return 0;
}
