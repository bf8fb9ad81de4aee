"""`kvloom pool control`."""

import secrets
import socket
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
import uvicorn

from kvloom.mistakes import problem_of
from kvloom.net import listening
from kvloom.net.listening import bracketed
from kvloom.net.sites import checked_hosts
from kvloom.pool.config import parse_address, read_option, read_secret
from kvloom.pool.control.service import build_app
from kvloom.pool.control.state import ControlState
from kvloom.reading import read_text

_FAREWELL_S = 1  # for requests under way when it is told to stop


def control(
    secret_file: Annotated[Path, typer.Option(help="File with the cluster's secret, at least 32 bytes.")],
    listen: Annotated[
        str, typer.Option(help="host:port; keep it on loopback or a private network.")
    ] = "127.0.0.1:8081",
    state: Annotated[Path, typer.Option(help="SQLite file with credentials, tenants and nodes.")] = Path(
        "ems-control.db"
    ),
    admin_token_file: Annotated[str, typer.Option(help="File with the administrators' bearer token.")] = "",
    allowed_host: Annotated[list[str] | None, typer.Option(help="Name it is asked under; may be repeated.")] = None,
) -> None:
    """Run the control plane. Without a token file a token is made and printed once."""
    try:
        secret = read_secret(secret_file)
        token = _token(Path(admin_token_file)) if admin_token_file else secrets.token_hex(32)
        host, port = parse_address(listen)
        hosts = checked_hosts(allowed_host or ()) | listening.own_names([host])
        with (
            listening.listen(host, port, option="--listen") as listener,
            closing(ControlState(state, time.time)) as opened,
        ):
            if not admin_token_file:
                typer.echo(f"admin token: {token}")
            app = build_app(opened, token, secret, hosts)
            settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_FAREWELL_S)
            _ControlServer(settings, listener).run(sockets=[listener])
    except sqlite3.Error as error:
        typer.echo(f"kvloom pool control: --state {state}: {error}", err=True)
        raise typer.Exit(1) from None
    except (OSError, ValueError) as error:
        typer.echo(f"kvloom pool control: {problem_of(error) or error}", err=True)
        raise typer.Exit(1) from None


def _token(path: Path) -> str:
    """Raises ValueError."""
    token = read_option("--admin-token-file", path, read_text).strip()
    if not token:
        raise ValueError(f"--admin-token-file: {path} is empty")
    return token


class _ControlServer(uvicorn.Server):
    """Says where it serves as soon as it does. SIGTERM and SIGINT end it, with 0, whatever its clients do."""

    def __init__(self, settings: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(settings)
        host, port = listener.getsockname()[:2]
        self._line = f"kvloom pool control: serving http://{bracketed(host)}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        typer.echo(self._line)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn on SIGTERM and SIGINT. Its own method notes the signal to raise it again at the end, which
        would kill the process before the state is closed.
        """
        self.should_exit = True
