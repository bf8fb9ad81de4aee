/* What a request may be, and how long an ended one is remembered: limits MODEL. The fake engine is quick. */
#include <unistd.h>

#include "check.h"

/* A request of `num_bytes` of text, and another whose unknown field is `depth` arrays deep. */
static char *long_request(size_t num_bytes)
{
    static const char head[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"", tail[] = "\"}]}";
    char *json = malloc(sizeof head + num_bytes + sizeof tail), *at = json;
    CHECK(json != NULL);
    at = (char *)memcpy(at, head, sizeof head - 1) + sizeof head - 1;
    at = (char *)memset(at, 'a', num_bytes) + num_bytes;
    memcpy(at, tail, sizeof tail);
    return json;
}

static char *deep_request(size_t depth)
{
    static const char head[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}], \"more\": ";
    char *json = malloc(sizeof head + 2 * depth + 2), *at = json;
    CHECK(json != NULL);
    at = (char *)memcpy(at, head, sizeof head - 1) + sizeof head - 1;
    at = (char *)memset(at, '[', depth) + depth;
    at = (char *)memset(at, ']', depth) + depth;
    memcpy(at, "}", 2);
    return json;
}

static void sizes(const char *model)
{
    OH_QoS_GewuSession session = session_on(model);
    struct mailbox box = MAILBOX;
    char *longest = long_request(16 << 20), *deepest = deep_request(64), *deep = deep_request(32);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(session, longest, put_reply, NULL).error, OH_QOS_GEWU_INVAL);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(session, deepest, put_reply, NULL).error, OH_QOS_GEWU_INVAL);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(session, deep, put_reply, &box).error, OH_QOS_GEWU_OK);
    wait_final(&box);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_OK);
    free(longest);
    free(deepest);
    free(deep);
}

/* Each of the last 1,024 requests that ended by themselves can be aborted, once. */
static void tombstones(const char *model)
{
    enum { NUM = 1024 };
    static OH_QoS_GewuRequest requests[NUM];
    OH_QoS_GewuSession session = session_on(model);
    for (int i = 0; i < NUM; i++) {
        struct mailbox box = MAILBOX;
        requests[i] = submit(session, put_reply, &box);
        wait_final(&box);
    }
    for (int i = 0; i < NUM; i++) {
        CHECK_EQUAL(OH_QoS_GewuAbortRequest(session, requests[i]), OH_QOS_GEWU_OK);
        CHECK_EQUAL(OH_QoS_GewuAbortRequest(session, requests[i]), OH_QOS_GEWU_NOENT);
    }
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_OK);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    sizes(argv[1]);
    tombstones(argv[1]);
    return 0;
}
