"""Agents for a bench run: processes on private sockets that end with it."""

import contextlib
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvloom.net.devcerts import make_files


@contextlib.contextmanager
def private_agent(pool_bytes: int, *options: str) -> Iterator[Path]:
    """An agent process; its socket. Raises RuntimeError when it does not start."""
    with tempfile.TemporaryDirectory(prefix="ems-bench-") as folder:
        path = Path(folder) / "ems.sock"
        command = [sys.executable, "-m", "kvloom", "pool", "agent", f"--socket={path}", f"--pool={pool_bytes}"]
        command += ["--ends-with-stdin", *options]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                if b"serving" not in process.stdout.readline():
                    raise RuntimeError("the agent did not start")
                yield path
            finally:
                process.stdin.close()


def free_port() -> int:
    """A loopback TCP port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def two_nodes(pool_bytes: int, is_encrypted: bool = False, *options: str) -> Iterator[tuple[Path, Path]]:
    """The sockets of two agents, `a` and `b`, that read from each other over loopback TCP, or TLS over it."""
    ports = {"a": free_port(), "b": free_port()}
    with tempfile.TemporaryDirectory(prefix="ems-bench-") as folder, contextlib.ExitStack() as stack:
        secret = Path(folder) / "secret"
        secret.write_text(secrets.token_hex(32))
        if is_encrypted:
            make_files(Path(folder))
        tls = [f"--tls-dir={folder}"] if is_encrypted else []
        paths = [
            stack.enter_context(
                private_agent(
                    pool_bytes,
                    f"--secret-file={secret}",
                    f"--node-id={name}",
                    f"--listen=127.0.0.1:{ports[name]}",
                    f"--peer={other}=127.0.0.1:{ports[other]}",
                    "--rcache=1",
                    *tls,
                    *options,
                )
            )
            for name, other in (("a", "b"), ("b", "a"))
        ]
        yield paths[0], paths[1]
