"""What `kvloom tune` writes: config.json, a table, and a page with a plot. Text in, text out."""

import html
import json
import re
from collections.abc import Callable, Iterator, Sequence

from kvloom.engine.errors import BadRequest
from kvloom.tuning.tune import Point, Proposal

_WIDTH, _HEIGHT, _MARGIN = 720, 420, 60
_TICKS = 5


def config_text(template: str, proposals: Sequence[Proposal]) -> str:
    """`template` (config.json, a key a line, with comments) with the proposed values, each behind its reason.

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
    """Markdown: the sweep as table 2-10 has it, then the proposals."""
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
    """A page with throughput against lpot, the limit and the chosen point marked; nothing is loaded."""
    right = max([point.lpot_ms for point in points] + ([limit_ms] if limit_ms is not None else [])) * 1.08
    top = max(point.generate_speed for point in points) * 1.08

    def at(lpot_ms: float, speed: float) -> tuple[float, float]:
        x = _MARGIN + lpot_ms / right * (_WIDTH - 2 * _MARGIN)
        return round(x, 1), round(_HEIGHT - _MARGIN - speed / top * (_HEIGHT - 2 * _MARGIN), 1)

    parts = list(_axes(right, top, at))
    ordered = sorted(points, key=lambda point: point.max_batch)
    path = " ".join(f"{x},{y}" for x, y in (at(p.lpot_ms, p.generate_speed) for p in ordered))
    parts.append(f'<polyline points="{path}" class="line"/>')
    if limit_ms is not None:
        (x, low), (_, high) = at(limit_ms, 0), at(limit_ms, top)
        parts.append(f'<line x1="{x}" y1="{low}" x2="{x}" y2="{high}" class="limit"/>')
        parts.append(f'<text x="{x + 4}" y="{high + 12}">limit {limit_ms:g} ms</text>')
    for point in ordered:
        x, y = at(point.lpot_ms, point.generate_speed)
        is_chosen = point == chosen
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="{7 if is_chosen else 4}" class="{"chosen" if is_chosen else "dot"}"/>'
        )
        label = f"{point.max_batch}{' (chosen)' if is_chosen else ''}"
        parts.append(f'<text x="{x + 8}" y="{y - 8}">{label}</text>')
    name = html.escape(title)
    return _PAGE.format(title=name, width=_WIDTH, height=_HEIGHT, body="\n".join(parts))


def _axes(right: float, top: float, at: Callable[[float, float], tuple[float, float]]) -> Iterator[str]:
    for i in range(_TICKS + 1):
        x, base = at(right * i / _TICKS, 0)
        yield f'<text x="{x}" y="{base + 18}" class="middle">{right * i / _TICKS:.3g}</text>'
        left, y = at(0, top * i / _TICKS)
        yield f'<text x="{left - 8}" y="{y + 4}" class="end">{top * i / _TICKS:.4g}</text>'
        yield f'<line x1="{left}" y1="{y}" x2="{_WIDTH - _MARGIN}" y2="{y}" class="grid"/>'
    yield f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 15}" class="middle">lpot, ms</text>'
    yield f'<text x="{_MARGIN}" y="{_MARGIN - 25}">generate speed, tok/s; numbers are maxBatchSize</text>'


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px system-ui, sans-serif; margin: 2rem auto; max-width: 760px; }}
svg text {{ font-size: 12px; fill: currentColor; }}
.middle {{ text-anchor: middle; }} .end {{ text-anchor: end; }}
.grid {{ stroke: currentColor; opacity: 0.15; }}
.line {{ fill: none; stroke: #2f7ed8; stroke-width: 2; }} .dot {{ fill: #2f7ed8; }} .chosen {{ fill: #d8562f; }}
.limit {{ stroke: #d8562f; stroke-dasharray: 5 4; }}
</style>
<h1>{title}</h1>
<svg viewBox="0 0 {width} {height}" role="img" aria-label="{title}">
{body}
</svg>
</html>
"""
