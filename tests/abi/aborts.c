/* No callback after Abort has returned: aborts MODEL COUNT. Prints COUNT, and the 99th percentile of Abort in ms. */
#include <unistd.h>

#include "check.h"

enum { BATCH = 50 };

struct target {
    OH_QoS_GewuRequest request;
    volatile int is_aborted, num_late, num_replies;
};

static void count(void *context, const char *response)
{
    struct target *target = context;
    (void)response;
    target->num_replies++;
    target->num_late += target->is_aborted;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    int total = atoi(argv[2]), done = 0, num_late = 0;
    double *times_s = calloc((size_t)total + BATCH, sizeof *times_s);
    OH_QoS_GewuSession sessions[BATCH];
    for (int i = 0; i < BATCH; i++) {
        sessions[i] = session_on(argv[1]);
    }
    while (done < total) {
        struct target targets[BATCH];
        memset((void *)targets, 0, sizeof targets);
        for (int i = 0; i < BATCH; i++) {
            targets[i].request = submit(sessions[i], count, &targets[i]);
        }
        for (int i = 0; i < BATCH; i++) {
            double start_s = now_s();
            CHECK_EQUAL(OH_QoS_GewuAbortRequest(sessions[i], targets[i].request), OH_QOS_GEWU_OK);
            targets[i].is_aborted = 1;
            times_s[done++] = now_s() - start_s;
        }
        sleep_s(0.002);
        for (int i = 0; i < BATCH; i++) {
            num_late += targets[i].num_late;
        }
    }
    for (int i = 0; i < BATCH; i++) {
        CHECK_EQUAL(OH_QoS_GewuDestroySession(sessions[i]), OH_QOS_GEWU_OK);
    }
    CHECK_EQUAL(num_late, 0);
    qsort(times_s, (size_t)done, sizeof *times_s, compare);
    printf("%d %.3f\n", done, 1e3 * times_s[done * 99 / 100]);
    free(times_s);
    return 0;
}
