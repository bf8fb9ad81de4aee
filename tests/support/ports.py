"""Ports for programs that need to know theirs before they listen."""

import itertools
import os
import socket

_FIRST, _NUM_EACH = 20_000, 2_000  # below those that the kernel assigns to port 0
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_numbers = itertools.count(os.getpid())  # other test runs begin elsewhere


def free_port() -> int:
    """A port that nobody else gets: none is given twice, and each worker has its own range."""
    while True:
        port = _FIRST + _WORKER * _NUM_EACH + next(_numbers) % _NUM_EACH
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
