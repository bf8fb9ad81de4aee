"""`kvloom pool bench`: one JSON line, and a table of it."""

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from kvloom.pool.bench import clients
from kvloom.pool.bench.measure import FRAGMENTED, NUM_KEYS, SIZES, Case, measure
from kvloom.pool.config import option, parse_size

_UNITS = {"_us": "us", "_ratio": "x memcpy", "_share": "of a load", "_to_": "times"}


def run(
    rounds: int, sizes: tuple[int, ...] = SIZES, num_clients: int = 4, has_fragmented: bool = True
) -> dict[str, Any]:
    """The body of the JSON line. num_clients: processes at once, 0 = none."""
    cases = [Case(size) for size in sizes] + ([Case(*FRAGMENTED)] if has_fragmented else [])
    body: dict[str, Any] = {"bench": "pool", "keys": NUM_KEYS, "rows": [measure(case, rounds) for case in cases]}
    if num_clients:
        body["clients"] = clients.measure(num_clients, rounds * 4)
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


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvloom pool bench", description="Measure the pool on this machine.")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds a size")
    parser.add_argument(
        "--size", type=option(parse_size), action="append", help="block size, for example 64K; repeatable"
    )
    parser.add_argument("--clients", type=int, default=4, help="processes at once in the last part; 0 leaves it out")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    args = parser.parse_args(arguments)
    if args.rounds < 1 or args.clients < 0:
        parser.error("--rounds: at least 1; --clients: at least 0")
    body = run(args.rounds, tuple(args.size or SIZES), args.clients, has_fragmented=not args.size)
    print(json.dumps(body))
    if not args.json:
        _print(body)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
