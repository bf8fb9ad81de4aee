"""What a child process does first, so that it ends when its parent decides, and when its parent ends.

Linux sends a signal of one's choice when the last writer of a pipe has closed it (fcntl(2), O_ASYNC and F_SETSIG). That
is how the kernel itself ends a child whose parent was killed, also a child that is stopped, computes, or waits for a
file system that hangs. The parent-death signal of prctl(2) would come when the parent's *thread* ends.
"""

import ctypes
import fcntl
import os
import select
import signal
import stat

THE_PARENTS = (signal.SIGINT, signal.SIGTERM)
_STDIN = 0
_PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # looked up here: little is safe between fork and exec


def begin() -> None:
    """For processes whose standard input is `child.lifeline()`, or another pipe that only their parent holds.

    Ignores Ctrl-C and SIGTERM, which reach the whole process group: the parent decides when this process ends. From now
    on the kernel kills this process, and its group if it leads one, when the parent has ended. Standard input is empty
    then. If it is no pipe, nobody is bound.
    """
    leave_signals_to_the_parent()
    if signal_at_end_of_stdin(signal.SIGKILL):
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(null, _STDIN)  # not for processes that this one starts
        os.close(null)


def leave_signals_to_the_parent() -> None:
    """Ignore Ctrl-C and SIGTERM."""
    for number in THE_PARENTS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, THE_PARENTS)  # child processes would inherit a block


def signal_at_end_of_stdin(number: signal.Signals) -> bool:
    """Have the kernel send a signal to this process, and its group if it leads one, when the last holder of the other
    end of standard input has ended; at once where it has already. SIGCONT lets a stopped process go on and read that
    end. Returns whether standard input is a pipe.
    """
    if not _is_pipe(_STDIN):
        return False
    # opened anew: flags and owner belong to the open file, which all children of the parent share; stays open
    pipe = os.open(f"/proc/self/fd/{_STDIN}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    own = os.getpid()
    fcntl.fcntl(pipe, fcntl.F_SETSIG, number)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -own if os.getpgrp() == own else own)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(pipe, 0)  # only its end
    if poll.poll(0):
        os.kill(own, number)
    return True


def _is_pipe(number: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(number).st_mode)
    except OSError:  # closed
        return False


def signal_at_end_of_thread(number: int = signal.SIGTERM) -> None:
    """Have the kernel send a signal to this process when the thread that started it ends, with its process or alone.

    As Popen's preexec_fn, for programs of others. Linux only.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number)
