"""The output of `kvloom bench`: tables, JSON lines, and the page with the plot."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from kvloom.bench.conversation import Exchange, of_kinds
from kvloom.bench.load import Point, as_row
from kvloom.bench.plot import Chart, Line, page

Row = dict[str, object]


def server_tables(points: Sequence[Point]) -> list[Table]:
    """Rates, then times in ms; E2EL: from a request to the end of its answer."""
    rates = _table("Server", "concurrency", "requests/s", "tok/s", "tok/s with prompts")
    times = _table("Server, ms", "concurrency", "TTFT p50", "p90", "p99", "TPOT p50", "gap p99", "E2EL p50", "p99")
    for each in points:
        ttft, e2el = each.ttft_ms, each.e2el_ms
        rates.add_row(str(each.concurrency), *map(_shown, (each.requests_s, each.tok_s, each.total_tok_s)))
        values = (ttft.p50, ttft.p90, ttft.p99, each.tpot_ms.p50, each.gap_ms.p99, e2el.p50, e2el.p99)
        times.add_row(str(each.concurrency), *map(_shown, values))
    return [rates, times]


def conversation_table(exchanges: Sequence[Exchange]) -> Table:
    """Tokens and times of each kind of request; `again`: tokens computed that had been computed before."""
    table = _table("Conversation", "", "num", "new", "again p50", "most", "sum", "TTFT ms p50", "most")
    table.columns[0].justify, table.columns[0].no_wrap = "left", True
    for kind, some in of_kinds(exchanges).items():
        again, ttft = [each.num_recomputed for each in some], [each.ttft_ms for each in some]
        counts = len(some), sum(each.num_new for each in some), round(statistics.median(again)), max(again), sum(again)
        table.add_row(kind, *(f"{count:,}" for count in counts), _shown(statistics.median(ttft)), _shown(max(ttft)))
    return table


def conversation_lines(exchanges: Sequence[Exchange], common: Row) -> str:
    """One JSON line a request."""
    rows = [
        {"bench": "kvloom", "level": "conversation", **asdict(each), "num_recomputed": each.num_recomputed, **common}
        for each in exchanges
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def conversation_plot(title: str, exchanges: Sequence[Exchange]) -> str:
    """The page: tokens computed again and the time to first token, by the number of each kind's request."""
    colors = ("#2563eb", "#16a34a", "#dc2626", "#9333ea", "#ea580c", "#0891b2")
    drawn = list(zip(of_kinds(exchanges).items(), colors, strict=True))

    def lines(name: str) -> list[Line]:
        return [
            Line(kind, [(float(each.number), float(getattr(each, name))) for each in some], color)
            for (kind, some), color in drawn
        ]

    table: list[Row] = [
        {"request": each.kind, "number": each.number, "prompt": each.num_prompt, "new": each.num_new,
         "again": each.num_recomputed, "TTFT ms": each.ttft_ms}
        for each in exchanges
    ]  # fmt: skip
    charts = [
        Chart("tokens computed again", "the how-manieth of its kind", lines("num_recomputed")),
        Chart("time to first token, ms", "the how-manieth of its kind", lines("ttft_ms")),
    ]
    return page(title, charts, table)


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title)
    for column in table.columns:
        column.justify = "right"
    return table


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def kernel_table(rows: Sequence[Row]) -> Table:
    dram = rows[0]["dram_gb_s"]
    table = Table("", "tok/s", "memory's limit", "share", title=f"Kernels, DRAM {dram} GB/s")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        limit, share = row.get("limit_tok_s"), row.get("share_of_limit")
        table.add_row(str(row["name"]), f"{row['tok_s']:,}", f"{limit:,}" if limit else "", str(share or ""))
    return table


def json_lines(points: Sequence[Point], kernels: Sequence[Row], common: Row) -> str:
    rows = [as_row(point) for point in points] + list(kernels)
    return "".join(json.dumps({"bench": "kvloom", **row, **common}) + "\n" for row in rows)


def plot(title: str, points: Sequence[Point], kernels: Sequence[Row]) -> str:
    """The page: tokens/s with the kernels' rate and the limit by memory bandwidth, and the time to first token."""
    points = sorted(points, key=lambda point: point.concurrency)
    decode = [row for row in kernels if "batch" in row]
    rates = [
        Line("server", [(point.concurrency, point.tok_s) for point in points], "#2563eb"),
        Line("kernels alone", [_xy(row, "tok_s") for row in decode], "#16a34a"),
        Line("memory's limit", _in_sight(points, decode), "#dc2626", is_dashed=True),
    ]
    ttft = [
        Line(name, [(point.concurrency, getattr(point.ttft_ms, name)) for point in points if point.ttft_ms.p50], color)
        for name, color in (("p50", "#2563eb"), ("p90", "#9333ea"), ("p99", "#ea580c"))
    ]
    table: list[Row] = [
        {"concurrency": p.concurrency, "tok/s": p.tok_s, "TTFT p50 ms": p.ttft_ms.p50, "p90": p.ttft_ms.p90,
         "p99": p.ttft_ms.p99, "TPOT p50 ms": p.tpot_ms.p50}
        for p in points
    ]  # fmt: skip
    drawn = [line for line in rates if line.points]
    charts = [
        Chart("tokens per second", "concurrency", drawn, is_log2=True),
        Chart("time to first token, ms", "concurrency", ttft, is_log2=True),
    ]
    return page(title, charts, table)


def _xy(row: Row, name: str) -> tuple[float, float]:
    return float(str(row["batch"])), float(str(row[name]))


def _in_sight(points: Sequence[Point], decode: Sequence[Row]) -> list[tuple[float, float]]:
    """The memory's limit, a line through 0, up to twice the fastest point: drawn further it would hide the others."""
    if not decode:
        return []
    batch, limit = _xy(decode[0], "limit_tok_s")
    slope = limit / batch
    rates = [point.tok_s for point in points] + [_xy(row, "tok_s")[1] for row in decode]
    first = min([float(point.concurrency) for point in points] + [_xy(row, "tok_s")[0] for row in decode])
    last = max([float(point.concurrency) for point in points] + [_xy(row, "tok_s")[0] for row in decode])
    end = min(last, max(2 * max(rates) / slope, 2 * first))
    xs = sorted({first, end, *(first * 2.0**i for i in range(8) if first * 2.0**i < end)})
    return [(x, slope * x) for x in xs]
