/*
 * The QoS level of the calling thread. It is only recorded, and sent with each request that the thread submits. It does
 * not change the nice value: an unprivileged thread can raise that but not lower it again, so Reset could not undo a
 * Set.
 */
#include "internal.h"

enum { UNSET = -1 };

static _Thread_local int thread_level = UNSET;

/* Records the level of this thread; returns 0, or -1 for an invalid level. */
int OH_QoS_SetThreadQoS(QoS_Level level)
{
    if ((int)level < QOS_BACKGROUND || level > QOS_USER_INTERACTIVE) {
        return -1;
    }
    thread_level = (int)level;
    return 0;
}

/* Clears the level of this thread; returns 0, or -1 if none was set. */
int OH_QoS_ResetThreadQoS(void)
{
    if (thread_level == UNSET) {
        return -1;
    }
    thread_level = UNSET;
    return 0;
}

/* Reads the level of this thread; returns 0, or -1 if `level` is NULL or none was set. */
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
