"""Figures as one self-contained HTML page with inline SVG charts: no script, nothing fetched. Pure."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 34, 46  # margins, pixels; the legend is on the right
_INNER_WIDTH, _INNER_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
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
    """`points`: (x, y) with x ascending, or equal for a vertical line. A dashed line is a limit and has no dots."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str
    is_dashed: bool = False
    labels: Sequence[str] = ()  # one for each point, written beside it


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over a common x axis; y starts at 0. `caption` names y and its unit. `is_log2`: log2 scale, x > 0."""

    caption: str
    x_name: str
    lines: Sequence[Line]
    is_log2: bool = False


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values to pixels."""

    low: float  # x at the left; its logarithm with is_log2
    high: float  # x at the right, likewise
    top: float  # y at the upper edge
    is_log2: bool

    def at(self, x: float, y: float) -> tuple[float, float]:
        x = math.log2(x) if self.is_log2 else x
        share = (x - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(_LEFT + share * _INNER_WIDTH, 1), round(_TOP + _INNER_HEIGHT * (1 - y / self.top), 1)


def page(title: str, charts: Sequence[Chart], rows: Sequence[dict[str, object]] = ()) -> str:
    """A page with those charts that have points, and `rows` as a table below them."""
    drawn = "".join(chart(each) for each in charts if any(line.points for line in each.lines))
    name = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>\n'
        f"<h1>{name}</h1>\n{drawn}{_table(rows)}</html>\n"
    )


def chart(drawn: Chart) -> str:
    """One chart as SVG; at least one of its lines must have points."""
    xs = sorted({x for line in drawn.lines for x, _ in line.points})
    top = _round_up(max(y for line in drawn.lines for _, y in line.points))
    if drawn.is_log2:
        scale, marks = _Scale(math.log2(xs[0]), math.log2(xs[-1]), top, is_log2=True), xs
    else:
        right = _round_up(xs[-1])
        scale = _Scale(0.0, right, top, is_log2=False)
        marks = [right * i / _NUM_TICKS for i in range(_NUM_TICKS + 1)]
    parts = [f'<text x="{_LEFT}" y="18" font-weight="bold">{html.escape(drawn.caption)}</text>', *_axes(scale, marks)]
    name = html.escape(drawn.x_name)
    parts.append(f'<text x="{_LEFT + _INNER_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{name}</text>')
    for index, line in enumerate(drawn.lines):
        parts += _draw(line, [scale.at(x, y) for x, y in line.points], index)
    label = html.escape(drawn.caption, quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>\n'


def _axes(scale: _Scale, marks: Sequence[float]) -> list[str]:
    """The grid with labels of y, and labels of x at `marks`."""
    parts = []
    for i in range(_NUM_TICKS + 1):
        value = scale.top * i / _NUM_TICKS
        _, y = scale.at(marks[-1], value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{value:,g}</text>')
    for x in marks:
        left, bottom = scale.at(x, 0)
        parts.append(f'<text x="{left}" y="{bottom + 18}" text-anchor="middle">{x:g}</text>')
    _, bottom = scale.at(marks[-1], 0)
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    return parts


def _draw(line: Line, points: Sequence[tuple[float, float]], index: int) -> list[str]:
    """The line, and its name as entry `index` of the legend."""
    dash = ' stroke-dasharray="6 4"' if line.is_dashed else ""
    stroke = f'fill="none" stroke="{line.color}" stroke-width="2"{dash}'
    path = " ".join(f"{x},{y}" for x, y in points)
    left, y = _WIDTH - _RIGHT + 12, _TOP + 14 + 20 * index
    dots = [] if line.is_dashed else [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{line.color}"/>' for x, y in points]
    labels = [
        f'<text x="{x + 6}" y="{y - 6}">{html.escape(text)}</text>'
        for (x, y), text in zip(points, line.labels, strict=False)
    ]
    return [
        f'<polyline points="{path}" {stroke}/>',
        *dots,
        *labels,
        f'<line x1="{left}" x2="{left + 24}" y1="{y}" y2="{y}" {stroke}/>',
        f'<text x="{left + 30}" y="{y + 4}">{html.escape(line.name)}</text>',
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
