#include "process.hpp"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

extern char **environ;

namespace kvloom {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

static constexpr int HOST_FD = 3;  /* its end of the socket */
static constexpr milliseconds END_WAIT(2000), POLL_WAIT(5);
#ifndef KVLOOM_ENGINE_END_MS
#define KVLOOM_ENGINE_END_MS 10000  /* an engine that closes frees its memory first */
#endif

/* The folder that contains lib/ with this library; "" when it is unknown. */
static std::string Prefix()
{
    Dl_info info;
    if (dladdr(reinterpret_cast<void *>(&FindHost), &info) == 0 || info.dli_fname == nullptr) {
        return "";
    }
    char *real = realpath(info.dli_fname, nullptr);
    const std::string path = real == nullptr ? "" : real;
    free(real);
    const size_t name = path.rfind('/');
    const size_t folder = name == std::string::npos || name == 0 ? name : path.rfind('/', name - 1);
    return folder == std::string::npos ? "" : path.substr(0, folder);
}

std::string FindHost()
{
    if (const char *named = secure_getenv("KVLOOM_ENGINE_HOST")) {
        return named;
    }
    const std::string installed = Prefix() + "/libexec/kvloom-engine-host";
    return access(installed.c_str(), X_OK) == 0 ? installed : "";
}

/* A pipe whose reading end does not have a number that the host's descriptors will have. False with errno. */
static bool MakeLifeline(int *ends)
{
    int made[2];
    if (pipe2(made, O_CLOEXEC) != 0) {
        return false;
    }
    ends[0] = fcntl(made[0], F_DUPFD_CLOEXEC, HOST_FD + 1);
    ends[1] = made[1];
    const int error = errno;
    close(made[0]);
    if (ends[0] < 0) {
        close(made[1]);
        errno = error;
    }
    return ends[0] >= 0;
}

int StartHost(const std::string &program, HostProcess *started)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
        return errno;
    }
    int lifeline[2];
    if (!MakeLifeline(lifeline)) {
        const int error = errno;
        close(ends[0]);
        close(ends[1]);
        return error;
    }
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], HOST_FD);
    posix_spawn_file_actions_adddup2(&actions, lifeline[0], STDIN_FILENO);

    /* signals as in a new process, whatever this one ignores or blocks */
    posix_spawnattr_t attributes;
    sigset_t all, none;
    sigfillset(&all);
    sigemptyset(&none);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);

    std::string fd = std::to_string(HOST_FD), name = program.empty() ? "kvloom" : program;
    std::string engine = "engine", host = "host";
    char *direct[] = {&name[0], &fd[0], nullptr};
    char *command[] = {&name[0], &engine[0], &host[0], &fd[0], nullptr};
    char **arguments = program.empty() ? command : direct;
    const int error = posix_spawnp(&started->pid, name.c_str(), &actions, &attributes, arguments, environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    close(lifeline[0]);
    if (error != 0) {
        close(ends[0]);
        close(lifeline[1]);
        return error;
    }
    started->fd = ends[0];
    started->lifeline = lifeline[1];
    return 0;
}

/* Whether the process is a child of this one that has ended and was not reaped yet. */
static bool IsZombie(pid_t pid, siginfo_t *info)
{
    info->si_pid = 0;
    return waitid(P_PID, static_cast<id_t>(pid), info, WEXITED | WNOHANG | WNOWAIT) == 0 && info->si_pid == pid;
}

/* Whether the process was not reaped yet, so that its id still belongs to it. */
static bool IsOurs(pid_t pid)
{
    siginfo_t info;
    return waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

std::string DescribeEnd(pid_t pid)
{
    siginfo_t info;
    for (const auto deadline = Clock::now() + END_WAIT; Clock::now() < deadline && IsOurs(pid);) {
        if (IsZombie(pid, &info)) {
            const std::string number = std::to_string(info.si_status);
            return info.si_code == CLD_EXITED ? "exited with " + number : "was killed by signal " + number;
        }
        std::this_thread::sleep_for(POLL_WAIT);
    }
    return IsOurs(pid) ? "closed its connection" : "has ended";
}

void ReapHost(pid_t pid)
{
    const auto deadline = Clock::now() + milliseconds(KVLOOM_ENGINE_END_MS);
    while (waitpid(pid, nullptr, WNOHANG) == 0) {
        if (Clock::now() >= deadline) {
            kill(pid, SIGKILL);
            waitpid(pid, nullptr, 0);
            return;
        }
        std::this_thread::sleep_for(POLL_WAIT);
    }
}

}
