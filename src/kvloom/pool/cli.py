"""`kvloom pool agent | control | status | bench | doctor`."""

import json
import os
import secrets
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
from rich.console import Console
from rich.table import Table

from ems.common.channel import CHANNEL_ERRORS, Channel
from ems.keys import NONCE_BYTES
from ems.wire import messages as m
from kvloom.pool import agent as agent_module
from kvloom.pool.config import DEFAULT_SOCKET, default_socket, parse_address, read_secret
from kvloom.pool.control import build_app
from kvloom.pool.control_state import ControlState
from kvloom.pool.segments import SharedMemory

app = typer.Typer(
    help="The elastic KV-cache pool: node agent, control plane, checks.", no_args_is_help=True, add_completion=False
)
_console = Console()
_PROBE_S = 2.0


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def agent(context: typer.Context) -> None:
    """Serve this node's share of the pool; `kvloom pool agent --help` lists its options."""
    raise typer.Exit(agent_module.main(context.args))


@app.command()
def control(
    secret_file: Annotated[str, typer.Option(help="File with the cluster's secret, at least 32 bytes.")],
    listen: Annotated[
        str, typer.Option(help="host:port; keep it on loopback or a private network.")
    ] = "127.0.0.1:8081",
    state: Annotated[Path, typer.Option(help="SQLite file with credentials, tenants and nodes.")] = Path(
        "ems-control.db"
    ),
    admin_token_file: Annotated[str, typer.Option(help="File with the administrators' bearer token.")] = "",
) -> None:
    """Run the control plane. Without a token file a token is made and printed once."""
    try:
        secret = read_secret(secret_file)
        token = Path(admin_token_file).read_text().strip() if admin_token_file else secrets.token_hex(32)
        host, port = parse_address(listen)
        opened = ControlState(state, time.time)
    except (OSError, ValueError, sqlite3.Error) as error:
        typer.echo(f"kvloom pool control: {error}", err=True)
        raise typer.Exit(1) from None
    if not admin_token_file:
        typer.echo(f"admin token: {token}")
    uvicorn.run(build_app(opened, token, secret), host=host, port=port, log_level="warning")
    opened.close()


@app.command()
def status(
    http: Annotated[str, typer.Option(help="host:port of the agent's --http.")] = "",
    path: Annotated[Path | None, typer.Option("--socket", help="The agent's socket.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False,
) -> None:
    """Say whether the agent serves, and with --http what is in its pools. Exit status 1 when it does not answer."""
    is_serving = _answers(path or _find_socket())
    body: dict[str, Any] = {"serving": is_serving}
    if http:
        try:
            with urllib.request.urlopen(f"http://{http}/stats", timeout=_PROBE_S) as answer:
                body["stats"] = json.load(answer)
        except (OSError, ValueError) as error:
            body["stats_error"] = str(error)
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


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Measure save and load against memcpy and other stores; `kvloom pool bench --help` lists its options."""
    done = subprocess.run([sys.executable, "-m", "kvloom.pool.bench", *context.args], check=False)  # it loads torch
    raise typer.Exit(done.returncode)


@app.command()
def doctor(path: Annotated[Path | None, typer.Option("--socket", help="The agent's socket.")] = None) -> None:
    """Check what the pool needs of this machine. Exit status 1 when something is missing."""
    place = path or _find_socket()
    checks = [
        ("sealed shared memory", _can_seal(), "needs Linux 5.1 or later with memfd_create and F_SEAL_FUTURE_WRITE"),
        ("socket directory", _is_writable(place), f"{place.parent} cannot be written; use --socket or XDG_RUNTIME_DIR"),
        ("agent", _answers(place), f"nothing serves {place}; start `kvloom pool agent` or set EMS_EMBEDDED=1"),
    ]
    for name, is_fine, advice in checks:
        _console.print(f"{'ok  ' if is_fine else 'MISS'} {name}{'' if is_fine else ': ' + advice}", highlight=False)
    raise typer.Exit(0 if all(is_fine for _name, is_fine, _advice in checks) else 1)


def _find_socket() -> Path:
    named = os.environ.get("EMS_SOCKET")
    if named:
        return Path(named)
    return Path(DEFAULT_SOCKET) if Path(DEFAULT_SOCKET).exists() else default_socket()


def _can_seal() -> bool:
    try:
        SharedMemory("ems-doctor", 4096, is_sealed=True).close()
    except OSError:
        return False
    return True


def _is_writable(place: Path) -> bool:
    folder = place.parent
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK)


def _answers(place: Path) -> bool:
    """Whether an agent greets on this socket; needs no key."""
    deadline_s = time.monotonic() + _PROBE_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_PROBE_S)
        try:
            sock.connect(str(place))
            channel = Channel(sock)
            channel.send(m.Hello("", bytes(NONCE_BYTES)), deadline_s)
            return isinstance(channel.receive(deadline_s).message, m.Challenge)
        except CHANNEL_ERRORS:
            return False
