/* Invalid arguments: input MODEL. Compiled with a small GEWU_MAX_ID, so that handles soon start again at 1. */
#include <unistd.h>

#include "../check.h"

enum { MIB = 1 << 20 };

static const char *model;

/* A text of `length` times the letter between a head and a tail; freed by the caller. */
static char *around(const char *head, char letter, size_t length, const char *tail)
{
    char *text = malloc(strlen(head) + length + strlen(tail) + 1);
    CHECK(text != NULL);
    strcpy(text, head);
    memset(text + strlen(head), letter, length);
    strcpy(text + strlen(head) + length, tail);
    return text;
}

/* Creates a session on `attributes`, which it frees; the answer must be `expected`. */
static void create_with(char *attributes, OH_QoS_GewuErrorCode expected)
{
    OH_QoS_GewuCreateSessionResult result = OH_QoS_GewuCreateSession(attributes);
    CHECK_EQUAL(result.error, expected);
    CHECK_EQUAL(result.session, OH_QOS_GEWU_INVALID_SESSION_ID);
    free(attributes);
}

/* Submits `request`, which it frees; the answer must be `expected`. */
static void submit_with(OH_QoS_GewuSession session, char *request, OH_QoS_GewuErrorCode expected)
{
    OH_QoS_GewuSubmitRequestResult result = OH_QoS_GewuSubmitRequest(session, request, put_reply, NULL);
    CHECK_EQUAL(result.error, expected);
    CHECK_EQUAL(result.request, OH_QOS_GEWU_INVALID_REQUEST_ID);
    free(request);
}

static void large_texts(void)
{
    OH_QoS_GewuSession session = session_on(model);
    create_with(around("{\"model\": \"/", 'a', 2 * MIB, "\"}"), OH_QOS_GEWU_INVAL);
    create_with(around("{\"model\": \"/", 'a', 17 * MIB, "\"}"), OH_QOS_GEWU_INVAL);
    create_with(around("{\"model\": \"/", 'a', 2 * MIB, ""), OH_QOS_GEWU_INVAL);
    create_with(around("", '[', 2 * MIB, ""), OH_QOS_GEWU_INVAL);
    create_with(around("", '\\', 2 * MIB, ""), OH_QOS_GEWU_INVAL);
    create_with(around("", '\xff', 2 * MIB, ""), OH_QOS_GEWU_INVAL);
    submit_with(session, around("{\"messages\": [{\"role\": \"user\", \"content\": \"", 'a', 2 * MIB, "\"}]}"),
        OH_QOS_GEWU_NOMEM);
    submit_with(session, around("{\"messages\": [{\"role\": \"user\", \"content\": \"", 'a', 17 * MIB, "\"}]}"),
        OH_QOS_GEWU_INVAL);
    submit_with(session, around("", '{', 2 * MIB, ""), OH_QOS_GEWU_INVAL);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_OK);
}

static void odd_paths(void)
{
    static const char *const attributes[] = {"", "{}", "[]", "null", "{\"model\": null}", "{\"model\": \"\"}",
        "{\"model\": [\"/\"]}", "{\"model\": \"/\\u0000\"}", "{\"model\": \"/\\ud800\"}", "{\"model\": \"/dev/null\"}",
        "{\"model\": \"/dev/tty\"}", "{\"model\": \"/proc/self/mem\"}", "{\"model\": \"/\"", "{\"model\""};
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++) {
        CHECK_EQUAL(OH_QoS_GewuCreateSession(attributes[i]).error, OH_QOS_GEWU_INVAL);
    }
}

/* Handles that were never returned, handles of the other kind, and handles of ended sessions and requests. */
static void wrong_handles(void)
{
    OH_QoS_GewuSession session = session_on(model), ended = session_on(model);
    struct mailbox box = MAILBOX;
    OH_QoS_GewuRequest request = submit(session, put_reply, &box);
    unsigned seed = 1;
    CHECK_EQUAL(OH_QoS_GewuDestroySession(ended), OH_QOS_GEWU_OK);
    for (int i = 0; i < 100000; i++) {
        unsigned random = (unsigned)rand_r(&seed) ^ ((unsigned)rand_r(&seed) << 8);
        if (random != session && random != request) {
            CHECK_EQUAL(OH_QoS_GewuDestroySession(random), OH_QOS_GEWU_NOENT);
            CHECK_EQUAL(OH_QoS_GewuAbortRequest(random, request), OH_QOS_GEWU_NOENT);
            CHECK_EQUAL(OH_QoS_GewuAbortRequest(session, random), OH_QOS_GEWU_NOENT);
        }
    }
    CHECK_EQUAL(OH_QoS_GewuAbortRequest(ended, request), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(ended, WHOLE, put_reply, NULL).error, OH_QOS_GEWU_NOENT);
    wait_final(&box);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_OK);
}

/* Handles start again at 1, and skip those in use. */
static void handles_begin_again(void)
{
    OH_QoS_GewuSession kept = session_on(model), last = kept;
    struct mailbox box = MAILBOX;
    OH_QoS_GewuRequest before = 0;
    int num_wrapped = 0;
    for (int i = 0; i < 2500; i++) {
        OH_QoS_GewuSession session = session_on(model);
        CHECK(session != kept);
        num_wrapped += session < last;
        last = session;
        CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_OK);
    }
    CHECK(num_wrapped >= 2);
    num_wrapped = 0;
    for (int i = 0; i < 1500; i++) {
        OH_QoS_GewuRequest request = submit(kept, put_reply, &box);
        num_wrapped += request < before;
        before = request;
        CHECK_EQUAL(OH_QoS_GewuAbortRequest(kept, request), OH_QOS_GEWU_OK);
        CHECK_EQUAL(OH_QoS_GewuAbortRequest(kept, request), OH_QOS_GEWU_NOENT);
    }
    CHECK(num_wrapped >= 1);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(kept), OH_QOS_GEWU_OK);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    model = argv[1];
    large_texts();
    odd_paths();
    wrong_handles();
    handles_begin_again();
    return 0;
}
