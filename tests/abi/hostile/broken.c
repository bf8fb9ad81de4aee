/* A service that goes away while a large request is on its way, again and again: broken MODEL. SIGPIPE would kill. */
#include <unistd.h>

#include "../check.h"

enum { ROUNDS = 20, LENGTH = 8 << 20 };

int main(int argc, char **argv)
{
    static char request[LENGTH + 1];
    CHECK(argc == 2);
    memset(request, ' ', LENGTH);
    for (int i = 0; i < ROUNDS; i++) {
        OH_QoS_GewuSession session = session_on(argv[1]);
        OH_QoS_GewuErrorCode error = OH_QoS_GewuSubmitRequest(session, request, put_reply, NULL).error;
        CHECK(error == OH_QOS_GEWU_FAULT || error == OH_QOS_GEWU_NOENT);
        CHECK_EQUAL(OH_QoS_GewuSubmitRequest(session, request, put_reply, NULL).error, OH_QOS_GEWU_NOENT);
    }
    return 0;
}
