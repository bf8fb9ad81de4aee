/* The engine's host: the process that Init starts, and that holds the model. */
#ifndef KVLOOM_PROCESS_HPP
#define KVLOOM_PROCESS_HPP

#include <string>
#include <sys/types.h>

namespace kvloom {

/*
 * What to start: $KVLOOM_ENGINE_HOST, a program that gets the number of its socket as its argument; else the one that was
 * installed with this library; else "", which stands for `kvloom` on the PATH.
 */
std::string FindHost();

struct HostProcess {
    pid_t pid;
    int fd;  /* this side's end of the socket; closes at exec */
};

/*
 * Starts it, with nothing of this process but its environment, working directory, standard output and error. Returns 0 or
 * an errno. A fork of this process must not happen meanwhile: its child would keep the socket open.
 */
int StartHost(const std::string &program, HostProcess *started);

/* How a process that has closed its socket ended: "was killed by signal 9". Waits up to 2 s for that; does not reap it. */
std::string DescribeEnd(pid_t pid);

/* Waits until the process has ended, kills it after some seconds, and reaps it unless that was done elsewhere. */
void ReapHost(pid_t pid);

}

#endif
