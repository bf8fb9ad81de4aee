/* A service that goes away while Submit waits for its answer: vanished MODEL. */
#include <unistd.h>

#include "check.h"

int main(int argc, char **argv)
{
    OH_QoS_GewuSubmitRequestResult result;
    OH_QoS_GewuSession session;
    CHECK(argc == 2);
    session = session_on(argv[1]);
    result = OH_QoS_GewuSubmitRequest(session, WHOLE, put_reply, NULL);
    CHECK_EQUAL(result.error, OH_QOS_GEWU_FAULT);
    CHECK_EQUAL(result.request, OH_QOS_GEWU_INVALID_REQUEST_ID);
    CHECK_EQUAL(OH_QoS_GewuSubmitRequest(session, WHOLE, put_reply, NULL).error, OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuAbortRequest(session, 1), OH_QOS_GEWU_NOENT);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_NOENT);
    return 0;
}
