"""`kvloom pool status`."""

import json
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from ems.common.sockets import find_socket
from kvloom.pool.config import parse_address
from kvloom.pool.control.link import one_line
from kvloom.pool.doctor import is_answered

_PROBE_S = 2.0


def status(
    http: Annotated[str, typer.Option(help="host:port of the agent's --http.")] = "",
    path: Annotated[Path | None, typer.Option("--socket", help="The agent's socket.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line.")] = False,
) -> None:
    """Say whether the agent serves, and with --http what is in its pools. Exit status 1 when it does not answer."""
    found = path or find_socket()
    is_serving = found is not None and is_answered(found)
    body: dict[str, Any] = {"serving": is_serving, "socket": None if found is None else str(found)}
    if http:
        try:
            parse_address(http)
            body["stats"] = (
                httpx.get(f"http://{http}/stats", timeout=_PROBE_S, trust_env=False).raise_for_status().json()
            )
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            body["stats_error"] = f"{http} gives none: {one_line(error)}"
    if as_json:
        typer.echo(json.dumps(body))
    else:
        _print_status(body)
    raise typer.Exit(0 if is_serving and "stats_error" not in body else 1)


def _print_status(body: dict[str, Any]) -> None:
    console = Console()
    state = "serving on" if body["serving"] else "does not answer on"
    lines = [f"agent: {state} {body['socket']}" if body["socket"] else "agent: there is no socket of one; see --socket"]
    if "stats_error" in body:
        lines.append(f"stats: {body['stats_error']}")
    console.print(*lines, sep="\n", markup=False, highlight=False, soft_wrap=True)  # a path stays one line
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
    console.print(table)
