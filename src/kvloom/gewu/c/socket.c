/* System calls of a connection: finding the daemon's address, connecting, checking the owner of the peer, one send. */
#include "internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

static const char SYSTEM_SOCKET[] = "/run/gewu/gewu.sock";

/* Writes the daemon's address: $GEWU_SOCKET, else the user's socket, else the system's. False if it is too long. */
static bool find_address(struct sockaddr_un *address)
{
    const char *path = getenv("GEWU_SOCKET"), *runtime = getenv("XDG_RUNTIME_DIR");
    char *target = address->sun_path;
    size_t size = sizeof address->sun_path;
    int length;
    address->sun_family = AF_UNIX;
    if (path != NULL && *path != '\0') {
        length = snprintf(target, size, "%s", path);
    } else if (runtime != NULL && *runtime != '\0') {
        length = snprintf(target, size, "%s/gewu.sock", runtime);
        if (length >= 0 && (size_t)length < size && access(target, F_OK) != 0) {
            length = snprintf(target, size, "%s", SYSTEM_SOCKET);
        }
    } else {
        length = snprintf(target, size, "%s", SYSTEM_SOCKET);
    }
    return length >= 0 && (size_t)length < size;
}

/* A socket that is not connected; -1 when the app is out of descriptors or memory. */
int gewu_socket(void)
{
    return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
}

/*
 * Connects, waiting until the deadline; errno EAGAIN if the daemon accepts no connections until then. The wait is a
 * blocking connect with SO_SNDTIMEO: a non-blocking one fails with EAGAIN if the queue is full, and poll cannot wait
 * for room in it.
 */
static bool connect_until(int fd, const struct sockaddr_un *address, const struct timespec *deadline)
{
    for (;;) {
        struct timespec left = gewu_time_left(deadline);
        struct timeval patience = {left.tv_sec, left.tv_nsec / 1000};
        if (patience.tv_sec == 0 && patience.tv_usec == 0) {  /* a timeout of 0 would mean none */
            errno = EAGAIN;
            return false;
        }
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
        if (connect(fd, (const struct sockaddr *)address, sizeof *address) == 0) {
            return true;
        }
        if (errno != EINTR) {
            return false;
        }
    }
}

/*
 * Whether the listening process belongs to this user or root. A process of another user would get prompts, and
 * descriptors of files that only the app may read.
 */
static bool is_trusted(int fd, const char *path)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
        return false;
    }
    if (peer.uid != 0 && peer.uid != geteuid()) {
        gewu_log("user %u listens on %s, which is neither this user nor root", (unsigned)peer.uid, path);
        return false;
    }
    return true;
}

/* Connects the socket to the daemon, waiting until the deadline. If that fails, logs the reason and returns false. */
bool gewu_socket_connect(int fd, const struct timespec *deadline)
{
    struct sockaddr_un address;
    if (!find_address(&address)) {
        gewu_log("the socket's path is longer than %zu bytes: set GEWU_SOCKET", sizeof address.sun_path - 1);
        return false;
    }
    if (!connect_until(fd, &address, deadline)) {
        gewu_log("no service answers on %s (%s): start it with `kvloom gewu daemon`", address.sun_path,
            strerror(errno));
        return false;
    }
    return is_trusted(fd, address.sun_path);
}

/*
 * Sends as much of two pieces as the socket accepts without blocking, and with the first byte the descriptor passed_fd,
 * unless that is negative. Returns the bytes sent; -1 with errno, EAGAIN if the socket is full.
 */
ptrdiff_t gewu_socket_send(int fd, struct iovec pieces[2], int passed_fd)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
    if (passed_fd >= 0) {
        memset(&control, 0, sizeof control);
        control.align = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET,
            .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(&control.align), &passed_fd, sizeof passed_fd);
        message.msg_control = &control;
        message.msg_controllen = sizeof control.bytes;
    }
    return sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}
