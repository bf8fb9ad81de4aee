/* The lock, conditions with deadlines on the monotonic clock, threads of the library's own, and numbers for handles. */
#include "internal.h"

#include <errno.h>
#include <signal.h>

enum { MS_PER_S = 1000, NS_PER_MS = 1000000, NS_PER_S = 1000000000 };

pthread_mutex_t gewu_lock = PTHREAD_MUTEX_INITIALIZER;

/* The next handle: never 0, never INVALID. The caller must skip handles that are in use. Lock held. */
unsigned gewu_next_id(unsigned *counter)
{
    *counter = *counter < GEWU_MAX_ID ? *counter + 1 : 1;
    return *counter;
}

/* A condition whose deadlines use the monotonic clock. */
void gewu_cond_init(pthread_cond_t *condition)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

/* The time on the monotonic clock that is `delay_ms` away. */
struct timespec gewu_deadline(unsigned delay_ms)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    time.tv_sec += delay_ms / MS_PER_S;
    time.tv_nsec += (long)(delay_ms % MS_PER_S) * NS_PER_MS;
    if (time.tv_nsec >= NS_PER_S) {
        time.tv_sec++;
        time.tv_nsec -= NS_PER_S;
    }
    return time;
}

/* The time left until the deadline; zero if it has passed. */
struct timespec gewu_time_left(const struct timespec *deadline)
{
    struct timespec now = gewu_deadline(0);
    struct timespec left = {deadline->tv_sec - now.tv_sec, deadline->tv_nsec - now.tv_nsec};
    if (left.tv_nsec < 0) {
        left.tv_sec--;
        left.tv_nsec += NS_PER_S;
    }
    return left.tv_sec < 0 ? (struct timespec){0, 0} : left;
}

/* Waits for a condition made by gewu_cond_init; false if the deadline has passed. Lock held, but released while
 * waiting. */
bool gewu_wait(pthread_cond_t *condition, const struct timespec *deadline)
{
    return pthread_cond_timedwait(condition, &gewu_lock, deadline) != ETIMEDOUT;
}

/* Starts a detached thread with all signals blocked; false if the system cannot create it. */
bool gewu_start_thread(void *(*run)(void *argument), void *argument)
{
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool is_started = pthread_create(&thread, NULL, run, argument) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (is_started) {
        pthread_detach(thread);
    }
    return is_started;
}
