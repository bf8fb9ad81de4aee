/* An app that is out of descriptors, before and after it has connected: descriptors MODEL. */
#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../check.h"

enum { MAX = 256, MOST_NEEDED = 3 };

static int taken[MAX], num_taken;

/* Takes every descriptor that is left. */
static void take_all(void)
{
    for (int fd; (fd = open("/dev/null", O_RDONLY)) >= 0;) {
        taken[num_taken++] = fd;
    }
}

/* Gives all of them back. */
static void give_all(void)
{
    while (num_taken > 0) {
        close(taken[--num_taken]);
    }
}

/* How many are open, the folder's own counted. */
static int count_open(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int count = 0;
    CHECK(folder != NULL);
    while (readdir(folder) != NULL) {
        count++;
    }
    closedir(folder);
    return count;
}

/* Create with none free, one free, ...: NOMEM until there are enough. The connection is kept if one was made. */
static void create_with_few(const char *model)
{
    OH_QoS_GewuCreateSessionResult result;
    take_all();
    for (int num_free = 0;; num_free++) {
        CHECK(num_free <= MOST_NEEDED);
        result = create(model);
        if (result.error == OH_QOS_GEWU_OK) {
            break;
        }
        CHECK_EQUAL(result.error, OH_QOS_GEWU_NOMEM);
        CHECK_EQUAL(result.session, OH_QOS_GEWU_INVALID_SESSION_ID);
        close(taken[--num_taken]);
    }
    CHECK_EQUAL(OH_QoS_GewuDestroySession(result.session), OH_QOS_GEWU_OK);
    give_all();
}

int main(int argc, char **argv)
{
    struct rlimit limit = {MAX - 8, MAX - 8};
    struct mailbox box = MAILBOX;
    CHECK(argc == 2 && setrlimit(RLIMIT_NOFILE, &limit) == 0);
    create_with_few(argv[1]);
    int num_open = count_open();
    create_with_few(argv[1]);
    OH_QoS_GewuSession session = session_on(argv[1]);
    take_all();
    submit(session, put_reply, &box);
    wait_final(&box);
    CHECK_EQUAL(OH_QoS_GewuDestroySession(session), OH_QOS_GEWU_OK);
    give_all();
    CHECK_EQUAL(count_open(), num_open);
    return 0;
}
