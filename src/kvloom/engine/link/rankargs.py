"""The arguments of a rank process: those documented for mindieservice_backend_connector (spec 3.4.2).

  Rank World_Size Npu_Device_Id Model_Instance_Type Deploy_Type Executor_Type Parent_Pid Shared_Memory_Name Log_Error
  Log_Warning Log_Info Log_Verbose Log_File

Where the document names shared memory, a rank gets the number of an open socket: socket:7. Its log goes to standard
error, which the server reads, so Log_File is "-".
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

DEPLOY_TYPE, EXECUTOR_TYPE = "INTER_PROCESS", "LLM_EXECUTOR_PYTHON"
TYPES = {"Standard": False, "StandardMock": True}  # value -> whether the model is the mock
_LEVELS = (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)
_SOCKET = "socket:"
USAGE = (
    "a rank is started by its server, with: Rank World_Size Npu_Device_Id Model_Instance_Type Deploy_Type "
    "Executor_Type Parent_Pid Shared_Memory_Name Log_Error Log_Warning Log_Info Log_Verbose Log_File"
)


@dataclass(frozen=True, slots=True)
class RankArguments:
    """What the server passes to a rank on its command line; everything else comes through the socket."""

    rank: int
    world_size: int
    device: int
    is_mock: bool
    socket: int  # number of the open socket to the server
    level: int  # log level; lower ones are not written

    def argv(self) -> list[str]:
        """The arguments as a list, without the program's name."""
        kind = next(name for name, is_mock in TYPES.items() if is_mock == self.is_mock)
        first = [str(self.rank), str(self.world_size), str(self.device), kind, DEPLOY_TYPE, EXECUTOR_TYPE]
        flags = [str(int(level >= self.level)) for level in _LEVELS]
        return [*first, str(os.getpid()), f"{_SOCKET}{self.socket}", *flags, "-"]


def parse(argv: Sequence[str]) -> RankArguments:
    """Raises ValueError, one sentence."""
    if len(argv) != 13:
        raise ValueError(USAGE)
    rank, world_size, device, kind, deploy, executor, parent, memory, *flags, file = argv
    for name, given, allowed in (
        ("Model_Instance_Type", kind, tuple(TYPES)),
        ("Deploy_Type", deploy, (DEPLOY_TYPE,)),
        ("Executor_Type", executor, (EXECUTOR_TYPE,)),
        ("Parent_Pid", parent, (str(os.getppid()),)),
        ("Log_File", file, ("-",)),
    ):
        if given not in allowed:
            raise ValueError(f"{name}: must be {' or '.join(allowed)}, got {given!r}; {USAGE}")
    numbers = [rank, world_size, device, memory.removeprefix(_SOCKET)]
    if not all(number.isdecimal() for number in numbers) or not memory.startswith(_SOCKET):
        raise ValueError(f"Shared_Memory_Name: must be {_SOCKET}N, an open socket; {USAGE}")
    if not set(flags) <= {"0", "1"}:
        raise ValueError(f"Log_Error to Log_Verbose: must be 0 or 1; {USAGE}")
    levels = [level for level, flag in zip(_LEVELS, flags, strict=True) if flag == "1"]
    own, size, card, socket = map(int, numbers)
    return RankArguments(own, size, card, TYPES[kind], socket, min(levels, default=logging.CRITICAL + 10))
