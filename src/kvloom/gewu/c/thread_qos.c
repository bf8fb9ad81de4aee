/*
 * The QoS level of the calling thread. It is recorded only, and goes out with each request the thread submits: an
 * unprivileged thread may raise its nice value but never lower it again, so Reset could not undo a Set.
 */
#include "internal.h"

enum { UNSET = -1 };

static _Thread_local int thread_level = UNSET;

/* Records the level of this thread; -1 for an invalid level. */
int OH_QoS_SetThreadQoS(QoS_Level level)
{
    if ((int)level < QOS_BACKGROUND || level > QOS_USER_INTERACTIVE) {
        return -1;
    }
    thread_level = (int)level;
    return 0;
}

/* Forgets the level of this thread; -1 when none was set. */
int OH_QoS_ResetThreadQoS(void)
{
    if (thread_level == UNSET) {
        return -1;
    }
    thread_level = UNSET;
    return 0;
}

/* Reads the level of this thread; -1 when none was set. */
int OH_QoS_GetThreadQoS(QoS_Level *level)
{
    if (level == NULL || thread_level == UNSET) {
        return -1;
    }
    *level = (QoS_Level)thread_level;
    return 0;
}

/* The calling thread's level as frames carry it: level + 1, or 0 when none was set. */
unsigned gewu_thread_qos(void)
{
    return (unsigned)(thread_level + 1);
}
