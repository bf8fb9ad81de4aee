/* Every call's results without faults of the service: calls MODEL. The fake engine streams about ten tokens at 200/s.
 * */
#include <unistd.h>

#include "check.h"

static const char *model;

static void thread_qos(void)
{
    QoS_Level level = QOS_BACKGROUND;
    CHECK_EQUAL(OH_QoS_GetThreadQoS(&level), -1);
    CHECK_EQUAL(OH_QoS_ResetThreadQoS(), -1);
    CHECK_EQUAL(OH_QoS_SetThreadQoS((QoS_Level)-1), -1);
    CHECK_EQUAL(OH_QoS_SetThreadQoS((QoS_Level)6), -1);
    CHECK_EQUAL(OH_QoS_SetThreadQoS((QoS_Level)1024), -1);
    CHECK_EQUAL(OH_QoS_GetThreadQoS(NULL), -1);
    for (int i = QOS_BACKGROUND; i <= QOS_USER_INTERACTIVE; i++) {
        CHECK_EQUAL(OH_QoS_SetThreadQoS((QoS_Level)i), 0);
        CHECK_EQUAL(OH_QoS_GetThreadQoS(&level), 0);
        CHECK_EQUAL(level, i);
    }
    CHECK_EQUAL(OH_QoS_GetThreadQoS(NULL), -1);
    CHECK_EQUAL(OH_QoS_ResetThreadQoS(), 0);
    CHECK_EQUAL(OH_QoS_GetThreadQoS(&level), -1);
    CHECK_EQUAL(OH_QoS_ResetThreadQoS(), -1);
}

/* The rows that the platform's conformance tests pin. */
static void conformance(void)
{
    OH_QoS_GewuSession session = session_on(model);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(0, "", put_reply, NULL).error, OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(OH_QOS_GEWU_INVALID_SESSION_ID, "", put_reply, NULL).error, OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(0, NULL, put_reply, NULL).error, OH_QOS_GEWU_FAULT);
    CHECK_EQUAL(OH_QoS_GewuAbortRequest(0, 0), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuAbortRequest(OH_QOS_GEWU_INVALID_SESSION_ID, 0), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuAbortRequest(session, 0), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(0), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(OH_QOS_GEWU_INVALID_SESSION_ID), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_OK);
}

static void order_of_checks(void)
{
    OH_QoS_GewuSession session = session_on(model);
    CHECK_EQUAL(OH_QoS_GewuCreateSession(NULL).error, OH_QOS_GEWU_FAULT);
    CHECK_EQUAL(OH_QoS_GewuCreateSession(NULL).session, OH_QOS_GEWU_INVALID_SESSION_ID);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(0, NULL, NULL, NULL).error, OH_QOS_GEWU_FAULT);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(session, NULL, put_reply, NULL).error, OH_QOS_GEWU_FAULT);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(session + 1, STREAMED, NULL, NULL).error, OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(session, "not json", NULL, NULL).error, OH_QOS_GEWU_INVAL);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(session, "not json", put_reply, NULL).error, OH_QOS_GEWU_INVAL);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(session, "not json", put_reply, NULL).request,
        OH_QOS_GEWU_INVALID_REQUEST_ID);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_OK);
}

static void handles(void)
{
    OH_QoS_GewuSession first = session_on(model), other = session_on(model), later;
    struct mailbox box = MAILBOX;
    OH_QoS_GewuRequest request = submit(first, put_reply, &box);
    CHECK_EQUAL(OH_QoS_GewuAbortRequest(other, request), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuAbortRequest(first, request + 1), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuAbortRequest(first, request), OH_QOS_GEWU_OK);
    CHECK_EQUAL(OH_QoS_GewuAbortRequest(first, request), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(first), OH_QOS_GEWU_OK);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(first), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuAbortRequest(first, request), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(first, STREAMED, put_reply, &box).error, OH_QOS_GEWU_NOENT);
    later = session_on(model);
    CHECK(later != first && later != other);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(later), OH_QOS_GEWU_OK);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(other), OH_QOS_GEWU_OK);
}

/* A request that has finished by itself can be aborted once: its last reply may have been on its way. */
static void abort_after_the_end(void)
{
    OH_QoS_GewuSession session = session_on(model);
    struct mailbox box = MAILBOX;
    OH_QoS_GewuRequest request = submit(session, put_reply, &box);
    wait_final(&box);
    CHECK_EQUAL(OH_QoS_GewuAbortRequest(session, request), OH_QOS_GEWU_OK);
    CHECK_EQUAL(OH_QoS_GewuAbortRequest(session, request), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_OK);
}

static void streamed_equals_whole(void)
{
    OH_QoS_GewuSession session = session_on(model);
    struct mailbox streamed = MAILBOX, whole = MAILBOX;
    submit(session, put_reply, &streamed);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(session, WHOLE, put_reply, &whole).error, OH_QOS_GEWU_OK);
    wait_final(&whole);
    wait_final(&streamed);
    CHECK(strcmp(streamed.text, whole.text) == 0);
    CHECK(streamed.num_replies > 2);
    CHECK_EQUAL(streamed.num_final, 1);
    CHECK_EQUAL(whole.num_replies, 1);
    CHECK(strstr(whole.last, "\"finish_reason\":\"stop\"") != NULL);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_OK);
}

/* One session's requests queue in order, up to 64; the next one is refused. Meanwhile the first of them are answered.
 * */
static void queue(void)
{
    enum { MAX = 64, ALL = 1000 };
    static struct mailbox boxes[ALL];
    OH_QoS_GewuSession session = session_on(model);
    int error = OH_QOS_GEWU_OK, accepted = 0;
    while (accepted < ALL) {
        boxes[accepted] = (struct mailbox)MAILBOX;
        error = OH_QoS_GewuSubmitRequest(session, STREAMED, put_reply, &boxes[accepted]).error;
        if (error != OH_QOS_GEWU_OK) {
            break;
        }
        accepted++;
    }
    CHECK_EQUAL(error, OH_QOS_GEWU_NOMEM);
    CHECK(accepted >= MAX);
    wait_final(&boxes[accepted - MAX]);
    CHECK(boxes[accepted - 1].num_replies == 0);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_OK);
}

static void other_process(void)
{
    OH_QoS_GewuSession session = session_on(model);
    struct mailbox box = MAILBOX;
    pid_t child = fork();
    if (child == 0) {
        CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_NOENT);
        _exit(OH_QoS_GewuDestroySession(session_on(model)) != OH_QOS_GEWU_OK);
    }
    submit(session, put_reply, &box);
    wait_final(&box);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_OK);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    model = argv[1];
    thread_qos();
    conformance();
    order_of_checks();
    handles();
    abort_after_the_end();
    streamed_equals_whole();
    queue();
    other_process();
    return 0;
}
