"""`kvloom pool bench`: one JSON line, and a table of it."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvloom.pool.bench.clients import measure as measure_clients
from kvloom.pool.bench.measure import FRAGMENTED, NUM_KEYS, SIZES, Case, measure
from kvloom.pool.config import parse_size
from kvloom.pool.options import read_by

_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 1 << 10, 16 << 20  # as many slices as fit into the ring; the agent's slab
_MAX_CLIENTS = 256  # the agent's --max-sessions
_UNITS = {"_us": "us", "_ratio": "x memcpy", "_share": "of a load", "_to_": "times"}


def run(
    rounds: int, sizes: tuple[int, ...] = SIZES, num_clients: int = 4, has_fragmented: bool = True
) -> dict[str, Any]:
    """The body of the JSON line. num_clients: processes at once, 0 = none."""
    cases = [Case(size) for size in sizes] + ([Case(*FRAGMENTED)] if has_fragmented else [])
    body: dict[str, Any] = {"bench": "pool", "keys": NUM_KEYS, "rows": [measure(case, rounds) for case in cases]}
    if num_clients:
        body["clients"] = measure_clients(num_clients, rounds * 4)
    return body


def _print(body: dict[str, Any]) -> None:
    rows = body["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("block_bytes", "fragments")))
    heads = [
        f"{row['block_bytes'] >> 10}K" + (f" in {row['fragments']}" if row["fragments"] > 1 else "") for row in rows
    ]
    table = Table("", "unit", *heads)
    for name in names:
        unit = next((unit for suffix, unit in _UNITS.items() if suffix in name), "GB/s")
        table.add_row(name, unit, *(str(row.get(name, "-")) for row in rows))
    console = Console()
    console.print(table)
    if "clients" in body:
        console.print(" ".join(f"{name}={value}" for name, value in body["clients"].items()))


def _parse_block(text: str) -> int:
    """Bytes of a block that can be measured. Raises ValueError."""
    size = parse_size(text)
    if not _MIN_BLOCK_BYTES <= size <= _MAX_BLOCK_BYTES:
        raise ValueError(f"a block has from 1K to 16M bytes, got {text!r}")
    return size


def bench(
    rounds: Annotated[int, typer.Option(min=1, max=1_000_000, help="Timed rounds a size.")] = 15,
    size: Annotated[
        list[int] | None,
        typer.Option(parser=read_by(_parse_block), metavar="SIZE", help="Block size, as 64K; repeatable."),
    ] = None,
    clients: Annotated[
        int, typer.Option(min=0, max=_MAX_CLIENTS, help="Processes at once in the last part; 0 leaves it out.")
    ] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Only the JSON line.")] = False,
) -> None:
    """Measure save and load on this machine against memcpy and other stores."""
    body = run(rounds, tuple(size or SIZES), clients, has_fragmented=not size)
    print(json.dumps(body))
    if not as_json:
        _print(body)
