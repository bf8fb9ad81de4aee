"""`kvloom pool agent | control | status | bench | doctor | credentials`."""

import json
import secrets
import socket
import sqlite3
import time
from contextlib import closing
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import uvicorn
from rich.console import Console
from rich.table import Table

from ems.common.sockets import find_socket
from kvloom.net import listening
from kvloom.net.listening import bracketed
from kvloom.net.sites import checked_hosts
from kvloom.net.tls import TlsError
from kvloom.pool.agent import serve
from kvloom.pool.auth import new_credential, read_credentials, write_credentials, write_private
from kvloom.pool.bench.cli import bench
from kvloom.pool.config import parse_address, read_secret
from kvloom.pool.control.link import one_line
from kvloom.pool.control.service import build_app
from kvloom.pool.control.state import ACCESS_ID, ControlState
from kvloom.pool.doctor import check_machine, is_answered
from kvloom.pool.options import parse
from kvloom.pool.stores.engine import EngineError

app = typer.Typer(
    help="The elastic KV-cache pool: node agent, control plane, checks.", no_args_is_help=True, add_completion=False
)
_console = Console()
_PROBE_S = 2.0


@app.command("agent")
@wraps(parse)
def agent(**given: Any) -> None:
    try:
        serve(parse(**given))
    except (OSError, ValueError, EngineError, TlsError) as error:
        typer.echo(f"kvloom pool agent: {error}", err=True)
        raise typer.Exit(1) from None


@app.command()
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
        token = Path(admin_token_file).read_text().strip() if admin_token_file else secrets.token_hex(32)
        if not token:
            raise ValueError(f"admin_token_file: {admin_token_file} is empty")
        host, port = parse_address(listen)
        hosts = checked_hosts(allowed_host or ()) | listening.own_names([host])
        with listening.listen(host, port) as listener, closing(ControlState(state, time.time)) as opened:
            if not admin_token_file:
                typer.echo(f"admin token: {token}")
            settings = uvicorn.Config(build_app(opened, token, secret, hosts), log_level="warning")
            _ControlServer(settings, listener).run(sockets=[listener])
    except (OSError, ValueError, sqlite3.Error) as error:
        typer.echo(f"kvloom pool control: {error}", err=True)
        raise typer.Exit(1) from None


class _ControlServer(uvicorn.Server):
    """Says where it serves as soon as it does."""

    def __init__(self, settings: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(settings)
        host, port = listener.getsockname()[:2]
        self._line = f"kvloom pool control: serving http://{bracketed(host)}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        typer.echo(self._line)


@app.command()
def status(
    http: Annotated[str, typer.Option(help="host:port of the agent's --http.")] = "",
    path: Annotated[Path | None, typer.Option("--socket", help="The agent's socket.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False,
) -> None:
    """Say whether the agent serves, and with --http what is in its pools. Exit status 1 when it does not answer."""
    found = path or find_socket()
    is_serving = found is not None and is_answered(found)
    body: dict[str, Any] = {"serving": is_serving}
    if http:
        try:
            body["stats"] = httpx.get(f"http://{http}/stats", timeout=_PROBE_S).raise_for_status().json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            body["stats_error"] = f"{http} gives none: {one_line(error)}"
    if as_json:
        typer.echo(json.dumps(body))
    else:
        _print_status(body)
    raise typer.Exit(0 if is_serving and "stats_error" not in body else 1)


def _print_status(body: dict[str, Any]) -> None:
    _console.print("agent: serving" if body["serving"] else "agent: does not answer")
    if "stats_error" in body:
        _console.print(f"stats: {body['stats_error']}")
    if "stats" not in body:
        return
    table = Table("tenant", "blocks", "used MiB", "quota MiB", "hit rate", "misses by cause")
    for pool in body["stats"]["pools"]:
        counts, usage = pool["counts"], pool["usage"]
        asked = counts.get("load_keys", 0)
        rate = f"{counts.get('load_hits', 0) / asked:.1%}" if asked else "-"
        misses = " ".join(f"{key[5:]} {value}" for key, value in sorted(counts.items()) if key.startswith("miss_"))
        used, quota = (f"{usage[name] / 2**20:.1f}" for name in ("used_bytes", "quota_bytes"))
        table.add_row(pool["tenant"], str(usage["blocks"]), used, quota, rate, misses or "-")
    _console.print(table)


app.command()(bench)


@app.command()
def doctor(
    path: Annotated[Path | None, typer.Option("--socket", help="The agent's socket.")] = None,
    access_id: Annotated[str, typer.Option(help="For an agent with keys: who asks.")] = "",
    access_key_file: Annotated[Path | None, typer.Option(help="File whose first line is the access key.")] = None,
) -> None:
    """Check what the pool needs of this machine, and connect as the SDK would. Exit status 1 when it cannot."""
    try:
        key = access_key_file.read_text().partition("\n")[0].strip() if access_key_file else ""
    except OSError as error:
        typer.echo(f"kvloom pool doctor: {error}", err=True)
        raise typer.Exit(1) from None
    checks = check_machine(path, access_id, key)
    for check in checks:
        line = f"MISS {check.name}: {check.problem}" if check.problem else f"ok   {check.name}"
        _console.print(line, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if any(check.problem for check in checks) else 0)


@app.command()
def credentials(
    file: Annotated[Path, typer.Argument(help="JSON file for `kvloom pool agent --credentials`; made when missing.")],
    access_id: Annotated[str, typer.Option(help="1 to 512 characters of 0-9 a-z . - _")],
    tenant: Annotated[str, typer.Option(help="Whose pool it opens; without it one of the same name.")] = "",
    key_file: Annotated[Path | None, typer.Option(help="Where the access key goes; without it, it is printed.")] = None,
) -> None:
    """Add an access id to a file of credentials, or give it a new key. The file holds no keys."""
    try:
        if not ACCESS_ID.fullmatch(access_id):
            raise ValueError("access_id: must be 1 to 512 characters of 0-9 a-z . - _")
        known = read_credentials(file) if file.exists() else []
        access_key = secrets.token_hex(32)
        fresh = new_credential(access_id, tenant or access_id, access_key)
        write_credentials(file, [*(each for each in known if each.access_id != access_id), fresh])
        if key_file is not None:
            write_private(key_file, f"{access_key}\n".encode())
        else:
            typer.echo(access_key)
    except (OSError, ValueError) as error:
        typer.echo(f"kvloom pool credentials: {error}", err=True)
        raise typer.Exit(1) from None
