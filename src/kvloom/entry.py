"""Where the programs begin: Ctrl-C ends each without a traceback, also while it is still being imported."""

import os
import signal
from importlib import import_module


def run(place: str) -> int | None:
    """Import "module:function" and call it. Returns its exit status; an interrupt ends the process by SIGINT."""
    is_python = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as behind nohup
    if is_python:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    module, _, name = place.partition(":")
    program = getattr(import_module(module), name)
    if is_python:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status: int | None = program()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        raise  # where the signal is blocked
    return status


def kvloom() -> int | None:
    """`kvloom`."""
    return run("kvloom.cli:main")


def mindieservice_daemon() -> int | None:
    """`mindieservice_daemon`."""
    return run("kvloom.server.run.daemon:main")


def llm_engine_test() -> int | None:
    """`llm_engine_test`."""
    return run("kvloom.tuning.engine_test:main")


def seceasy_encrypt() -> int | None:
    """`seceasy_encrypt`."""
    return run("kvloom.server.secure.keystore.commands:seceasy_encrypt")


def config_tls() -> int | None:
    """`config_mindie_server_tls_cert.py`."""
    return run("kvloom.server.secure.keystore.commands:config_tls")
