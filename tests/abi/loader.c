/* dlopen with RTLD_LOCAL, the back end's names, and dlclose with a request running: loader LIBRARY MODEL. */
#include <dlfcn.h>
#include <stdatomic.h>
#include <unistd.h>

#include "check.h"

static atomic_int num_replies;

static void count(void *context, const char *response)
{
    (void)context;
    (void)response;
    num_replies++;
}

int main(int argc, char **argv)
{
    char attributes[4200];
    CHECK(argc == 3);
    void *library = dlopen(argv[1], RTLD_LAZY | RTLD_LOCAL);
    CHECK(library != NULL);
    OH_QoS_GewuCreateSessionResult (*create_session)(const char *);
    OH_QoS_GewuSubmitRequestResult (*submit_request)(OH_QoS_GewuSession, const char *, OH_QoS_GewuOnResponse, void *);
    *(void **)&create_session = dlsym(library, "GewuCreateSession");
    *(void **)&submit_request = dlsym(library, "GewuSubmitRequest");
    CHECK(create_session != NULL && submit_request != NULL);
    CHECK(dlsym(library, "GewuAbortRequest") != NULL && dlsym(library, "GewuDestroySession") != NULL);
    snprintf(attributes, sizeof attributes, "{\"model\": \"%s\"}", argv[2]);
    OH_QoS_GewuCreateSessionResult session = create_session(attributes);
    CHECK_EQUAL(session.error, OH_QOS_GEWU_OK);
    CHECK_EQUAL(submit_request(session.session, STREAMED, count, NULL).error, OH_QOS_GEWU_OK);
    CHECK_EQUAL(dlclose(library), 0);
    while (num_replies < 3) {
        sleep_s(0.005);
    }
    return 0;
}
