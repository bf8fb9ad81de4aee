"""Points to one self-contained HTML page with two inline SVG charts: no script, nothing fetched. Pure."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 34, 46  # margins, pixels; the legend is on the right
_NUM_TICKS = 5
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: currentColor; }
.axis { stroke: currentColor; } .grid { stroke: currentColor; opacity: .15; }
table { border-collapse: collapse; } td, th { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884; }
"""


@dataclass(frozen=True, slots=True)
class Line:
    """`points`: (x, y), x and y above 0, in rising order of x. A dashed line is a limit."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str
    is_dashed: bool = False


def page(title: str, rows: Sequence[dict[str, object]], lines: Sequence[tuple[str, Sequence[Line]]]) -> str:
    """`lines`: a caption with its unit, and the lines of one chart; `rows` become the table below."""
    charts = "".join(chart(caption, drawn) for caption, drawn in lines if any(line.points for line in drawn))
    name = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>\n'
        f"<h1>{name}</h1>\n{charts}{_table(rows)}</html>\n"
    )


def chart(caption: str, lines: Sequence[Line]) -> str:
    """An SVG chart over concurrency: x in powers of two, y from 0."""
    xs = sorted({x for line in lines for x, _ in line.points})
    top = _round_up(max(y for line in lines for _, y in line.points))
    low, high = math.log2(xs[0]), math.log2(xs[-1])
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        share = (math.log2(x) - low) / (high - low) if high > low else 0.5
        return round(_LEFT + share * inner_width, 1), round(_TOP + inner_height * (1 - y / top), 1)

    parts = [f'<text x="{_LEFT}" y="18" font-weight="bold">{html.escape(caption)}</text>']
    for i in range(_NUM_TICKS + 1):
        value = top * i / _NUM_TICKS
        _, y = at(xs[0], value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{value:,g}</text>')
    for x in xs:
        left, bottom = at(x, 0)
        parts.append(f'<text x="{left}" y="{bottom + 18}" text-anchor="middle">{x:g}</text>')
    left, bottom = at(xs[0], 0)
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text x="{_LEFT + inner_width / 2}" y="{_HEIGHT - 8}" text-anchor="middle">concurrency</text>')
    for place, line in enumerate(lines):
        parts += _draw(line, [at(x, y) for x, y in line.points], place)
    label = html.escape(caption, quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>\n'


def _draw(line: Line, points: Sequence[tuple[float, float]], place: int) -> list[str]:
    dash = ' stroke-dasharray="6 4"' if line.is_dashed else ""
    stroke = f'fill="none" stroke="{line.color}" stroke-width="2"{dash}'
    path = " ".join(f"{x},{y}" for x, y in points)
    left, y = _WIDTH - _RIGHT + 12, _TOP + 14 + 20 * place
    name = html.escape(line.name)
    dots = [] if line.is_dashed else [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{line.color}"/>' for x, y in points]
    return [
        f'<polyline points="{path}" {stroke}/>',
        *dots,
        f'<line x1="{left}" x2="{left + 24}" y1="{y}" y2="{y}" {stroke}/>',
        f'<text x="{left + 30}" y="{y + 4}">{name}</text>',
    ]


def _round_up(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    if value <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(value))
    return next(step * scale for step in (1, 2, 5, 10) if step * scale >= value)


def _table(rows: Sequence[dict[str, object]]) -> str:
    if not rows:
        return ""
    names = list(rows[0])
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(row.get(name, '')))}</td>" for name in names) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>\n"
