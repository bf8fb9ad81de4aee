"""The output of `kvloom tune`: config.json, a table, and a page with a plot. Text in, text out."""

import json
import re
from collections.abc import Sequence

from kvloom.bench.plot import Chart, Line, page
from kvloom.contract.errors import BadRequest
from kvloom.tuning.tune import Point, Proposal


def config_text(template: str, proposals: Sequence[Proposal]) -> str:
    """`template` (a config.json with one key a line, and comments) with the proposed values, each after its reason.

    Raises BadRequest when the template lacks a key.
    """
    text = template
    for proposal in proposals:
        line = re.compile(rf'^(\s*)("{re.escape(proposal.key)}": )[^\n]*?(,?)$', re.MULTILINE)
        found = line.search(text)
        if found is None:
            raise BadRequest(proposal.key, "is not a key of the configuration's layout")
        indent, name, comma = found.groups()
        tuned = f"{indent}// tuned: {proposal.reason}\n{indent}{name}{json.dumps(proposal.value)}{comma}"
        text = text[: found.start()] + tuned + text[found.end() :]
    return text


def table_text(points: Sequence[Point], chosen: Point, proposals: Sequence[Proposal]) -> str:
    """Markdown: the sweep in the form of spec table 2-10, then the proposals."""
    lines = [
        "| maxBatchSize | lpot, ms | generate speed, tok/s | first token, ms | |",
        "| --- | --- | --- | --- | --- |",
    ]
    for point in sorted(points, key=lambda point: -point.max_batch):
        mark = "chosen" if point == chosen else ""
        cells = (point.max_batch, f"{point.lpot_ms:.1f}", f"{point.generate_speed:.0f}", f"{point.first_token_ms:.0f}")
        lines.append("| " + " | ".join(map(str, cells)) + f" | {mark} |")
    lines += ["", "| key | value | why |", "| --- | --- | --- |"]
    lines += [f"| {p.key} | {json.dumps(p.value)} | {p.reason} |" for p in proposals]
    return "\n".join(lines) + "\n"


def plot_html(points: Sequence[Point], chosen: Point, limit_ms: float | None, title: str) -> str:
    """A page with throughput over lpot, with the limit and the chosen point marked; it loads nothing."""
    ordered = sorted(points, key=lambda point: point.max_batch)
    lines = [
        Line("measured", [_xy(p) for p in ordered], "#2563eb", labels=[str(p.max_batch) for p in ordered]),
        Line(f"{chosen.max_batch} (chosen)", [_xy(chosen)], "#dc2626"),
    ]
    if limit_ms is not None:
        top = max(point.generate_speed for point in points)
        lines.append(Line(f"limit {limit_ms:g} ms", [(limit_ms, 0.0), (limit_ms, top)], "#dc2626", is_dashed=True))
    return page(title, [Chart("generate speed, tok/s; numbers are maxBatchSize", "lpot, ms", lines)])


def _xy(point: Point) -> tuple[float, float]:
    return point.lpot_ms, point.generate_speed
