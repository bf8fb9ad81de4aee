"""A worker's share of the processor: by nice values where it may lower them again, else by the number of cores."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress

from kvloom.gewu.qos import NICE, Level


def may_lower_nice() -> bool:
    """Whether this process may lower its nice value again (CAP_SYS_NICE, or the limit allows it)."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice + 1)
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    except PermissionError:
        return False
    return True


def cores_for(level: Level, cores: Iterable[int]) -> set[int]:
    """The cores for a class: for BACKGROUND and UTILITY the upper half, at least one; else all."""
    found = sorted(cores)
    return set(found[len(found) // 2 :]) if level <= Level.UTILITY else set(found)


class CpuShare:
    """Gives all threads of this process the share of the class that is being served."""

    def __init__(self, is_able: bool | None = None) -> None:
        """`is_able`: whether nice values may be lowered; None = find out."""
        self._is_able = may_lower_nice() if is_able is None else is_able
        self._base = self._nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._all = self._cores = os.sched_getaffinity(0)

    def serve(self, level: Level) -> None:
        if self._is_able:
            nice = self._base + NICE[level]
            if nice != self._nice:
                self._nice = nice
                _each_thread(lambda thread: os.setpriority(os.PRIO_PROCESS, thread, nice))
        else:
            cores = cores_for(level, self._all)
            if cores != self._cores:
                self._cores = cores
                _each_thread(lambda thread: os.sched_setaffinity(thread, cores))


def _each_thread(change: Callable[[int], None]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            change(int(thread))
