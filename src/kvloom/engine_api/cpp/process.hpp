/* The engine's host: the process that Init starts, and that holds the model. */
#ifndef KVLOOM_PROCESS_HPP
#define KVLOOM_PROCESS_HPP

#include <string>
#include <sys/types.h>

namespace kvloom {

/*
 * The program to start as the host: $KVLOOM_ENGINE_HOST, which gets the number of its socket as its argument; else the
 * one that was installed with this library; else "", which stands for `kvloom` on the PATH.
 */
std::string FindHost();

struct HostProcess {
    pid_t pid;
    int fd;        /* this side's end of the socket; closes at exec */
    int lifeline;  /* the writing end of the host's standard input, which ends with this process; closes at exec */
};

/*
 * Starts the host. It ends with this process. It inherits only environment, working directory, standard output and standard error. Returns 0 or an
 * errno. No fork of this process may happen meanwhile: the child would keep the socket open.
 */
int StartHost(const std::string &program, HostProcess *started);

/* Describes how a process that has closed its socket ended: "was killed by signal 9". Waits up to 2 s; does not reap
 * it. */
std::string DescribeEnd(pid_t pid);

/* Waits until the process has ended, kills it after KVLOOM_ENGINE_END_MS, and reaps it unless something else has. */
void ReapHost(pid_t pid);

}

#endif
