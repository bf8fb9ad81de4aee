"""Ports for programs that must be told theirs before they listen."""

import itertools
import os
import socket

_FIRST, _NUM_EACH = 20_000, 2_000  # below those that the kernel gives to whoever asks for any
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_numbers = itertools.count(os.getpid())  # other runs of the tests begin elsewhere


def free_port() -> int:
    """Nobody else gets it meanwhile: no port is given twice, and each worker has its own."""
    while True:
        port = _FIRST + _WORKER * _NUM_EACH + next(_numbers) % _NUM_EACH
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
