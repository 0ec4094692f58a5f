"""Pictures of a simulated program: for the terminal, and as SVG for a page.

Both draw time from left to right and one line per rank. A label is the kind and the microbatch. Where a rank holds two
stages, the first is upper case and the second lower case; where it holds more, a small figure counts them.

    rank 0  F0 F1 .     .     B0─── B1───
    rank 1  .  F0 B0─── F1 B1───
"""

from __future__ import annotations

from html import escape
from math import ceil

from vpipe.schedule.action import Kind
from vpipe.schedule.program import Program
from vpipe.schedule.simulate import Simulation, Span

COLOURS = {Kind.F: 44, Kind.B: 42, Kind.I: 46, Kind.W: 43, Kind.R: 45, Kind.REDUCE: 47, Kind.STEP: 47}
"""Kind → background colour of a terminal."""
NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.R: "recompute",
    Kind.REDUCE: "reduce",
    Kind.STEP: "update",
}
_SMALL = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def label(program: Program, rank: int, span: Span) -> str:
    """``F0``; ``f0`` for the second of two stages on the rank; ``F0³`` for the fourth of many."""
    stages = program.placement.stages_of[rank]
    stage, kind, microbatch = span.action
    short = kind.value if microbatch < 0 else f"{kind}{microbatch}"
    if len(stages) == 1:
        return short
    chunk = stages.index(stage)
    if len(stages) == 2:
        return short.lower() if chunk else short
    return short + str(chunk).translate(_SMALL)


def text(simulation: Simulation, *, width: int | None = None, colour: bool = False) -> str:
    """The picture in characters, in bands of at most ``width`` columns; actions that take no time are left out."""
    program = simulation.program
    rows = [
        [(label(program, rank, span), span) for span in spans if span.end > span.begin]
        for rank, spans in enumerate(simulation.spans)
    ]
    flat = [each for row in rows for each in row]
    if not flat:
        return "nothing takes time here\n"
    shortest = min(span.end - span.begin for _, span in flat)
    scale = (max(len(name) for name, _ in flat) + 1) / shortest
    origin = min(span.begin for _, span in flat)
    margin = len(f"rank {program.num_ranks - 1}  ")
    length = round(simulation.makespan * scale)
    band = length if width is None else max(10, width - margin)
    lines: list[str] = []
    for start in range(0, length, band):
        for rank, row in enumerate(rows):
            lines.append(
                f"rank {rank}".ljust(margin) + _line(row, origin, scale, start, min(start + band, length), colour)
            )
        lines.append("")
    return "\n".join([*lines, *_legend(simulation, colour)]) + "\n"


def _line(row: list[tuple[str, Span]], origin: float, scale: float, start: int, stop: int, colour: bool) -> str:
    """Columns ``start`` to ``stop`` of one rank."""
    cells = [" "] * (stop - start)
    for name, span in row:
        left, right = round((span.begin - origin) * scale), round((span.end - origin) * scale)
        drawn = name.ljust(right - left - 1, " " if colour else "─")[: right - left - 1] + " "
        for column in range(max(left, start), min(right, stop)):
            sign = drawn[column - left]
            painted = colour and column < right - 1
            cells[column - start] = f"\x1b[30;{COLOURS[span.action.kind]}m{sign}\x1b[0m" if painted else sign
    if not colour:
        _dot(cells, row, origin, scale, start)
    return "".join(cells).rstrip()


def _dot(cells: list[str], row: list[tuple[str, Span]], origin: float, scale: float, start: int) -> None:
    """A dot where a rank waits, so that plain pictures keep their columns."""
    at = 0.0
    for _, span in row:
        idle = round((span.begin - origin) * scale) - round(at * scale)
        column = round(at * scale) - start
        if idle > 0 and 0 <= column < len(cells):
            cells[column] = "·"
        at = span.end - origin


def _legend(simulation: Simulation, colour: bool) -> list[str]:
    kinds = [kind for kind in NAMES if any(span.action.kind is kind for row in simulation.spans for span in row)]
    if colour:
        legend = "  ".join(f"\x1b[30;{COLOURS[kind]}m {kind} \x1b[0m {NAMES[kind]}" for kind in kinds)
    else:
        legend = "  ".join(f"{kind} {NAMES[kind]}" for kind in kinds) + "  · idle"
    peak = max(simulation.peak_activations, default=0)
    figures = f"makespan {simulation.makespan:g}, bubble {simulation.bubble:.1%}, peak activations {peak:g}"
    return [legend, figures]


FILLS = {
    Kind.F: ("#9cc3f0", "#2f6db5"),
    Kind.B: ("#9fd8a4", "#2f7d46"),
    Kind.I: ("#9ed9d3", "#24797a"),
    Kind.W: ("#f2cf8d", "#96691c"),
    Kind.R: ("#d5b6ea", "#74479a"),
    Kind.REDUCE: ("#d0d3d8", "#6a717c"),
    Kind.STEP: ("#d0d3d8", "#6a717c"),
}
"""Kind → fill on a light page, on a dark page."""
ROW, GAP, MARGIN, HEAD, FOOT = 24, 4, 58, 34, 44
MAX_WIDTH = 1180


def svg(simulation: Simulation, title: str) -> str:
    """The picture as an SVG document that follows the page's light or dark scheme."""
    program = simulation.program
    spans = simulation.spans
    shortest = min((s.end - s.begin for row in spans for s in row if s.end > s.begin), default=1.0)
    origin = min((row[0].begin for row in spans if row), default=0.0)
    length = max(simulation.makespan, 1e-12)
    scale = min(24 / shortest, (MAX_WIDTH - MARGIN - 16) / length)
    width = max(ceil(MARGIN + length * scale + 16), 460)
    foot = HEAD + program.num_ranks * (ROW + GAP) + 14
    kinds = [kind for kind in NAMES if any(span.action.kind is kind for row in spans for span in row)]
    body = [f'<text class="t" x="12" y="21">{escape(title)}</text>']
    for rank, row in enumerate(spans):
        top = HEAD + rank * (ROW + GAP)
        body.append(f'<text class="r" x="12" y="{top + 16}">rank {rank}</text>')
        body.append(
            f'<rect class="idle" x="{MARGIN}" y="{top}" width="{_number(length * scale)}" height="{ROW}" rx="2"/>'
        )
        body += [_box(program, rank, span, MARGIN + (span.begin - origin) * scale, top, scale) for span in row]
    body += _axis(length, scale, foot)
    body += _key(kinds, foot + 22)
    return _document(width, foot + FOOT, title, body)


def _box(program: Program, rank: int, span: Span, left: float, top: int, scale: float) -> str:
    duration = span.end - span.begin
    action, kind = span.action, span.action.kind
    hint = f"<title>{action}: {span.begin:g} to {span.end:g}</title>"
    if duration <= 0:
        return (
            f'<path class="k{kind}" d="M{_number(left)} {top}v{ROW}"><title>{action} at {span.begin:g}</title></path>'
        )
    stages = program.placement.stages_of[rank]
    chunk = stages.index(action.stage)
    wide = max(duration * scale - 1, 0.4)
    shade = "" if not chunk else f' fill-opacity="{1 - 0.62 * chunk / (len(stages) - 1):.2f}"'
    box = f'<rect class="k{kind}" x="{_number(left)}" y="{top}" width="{_number(wide)}" height="{ROW}" rx="2"{shade}>{hint}</rect>'
    number = "" if action.microbatch < 0 else str(action.microbatch)
    if not number or wide < 7 * len(number) + 2:
        return box
    return box + f'<text class="n" x="{_number(left + wide / 2)}" y="{top + 16}">{number}</text>'


def _axis(length: float, scale: float, top: int) -> list[str]:
    """Round numbers of time below the picture."""
    steps = (magnitude * factor for magnitude in (0.01, 0.1, 1, 10, 100, 1000, 1e4, 1e5, 1e6) for factor in (1, 2, 5))
    step = next((step for step in steps if step * scale >= 44), length)
    return [
        f'<text class="a" x="{_number(MARGIN + number * step * scale)}" y="{top}">{number * step:g}</text>'
        for number in range(int(length / step + 1e-9) + 1)
    ]


def _key(kinds: list[Kind], top: int) -> list[str]:
    drawn, left = [], float(MARGIN)
    for kind in kinds:
        drawn.append(f'<rect class="k{kind}" x="{_number(left)}" y="{top - 10}" width="12" height="12" rx="2"/>')
        drawn.append(f'<text class="l" x="{_number(left + 17)}" y="{top}">{NAMES[kind]}</text>')
        left += 34 + 6.2 * len(NAMES[kind])
    return drawn


def _document(width: int, height: int, title: str, body: list[str]) -> str:
    light = "".join(f".k{kind}{{fill:{fill[0]}}}" for kind, fill in FILLS.items())
    dark = "".join(f".k{kind}{{fill:{fill[1]}}}" for kind, fill in FILLS.items())
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
            f"<title>{escape(title)}</title>",
            "<style>",
            "text{font:12px ui-sans-serif,system-ui,'DejaVu Sans',sans-serif;fill:#24292f}.t{font-size:14px;font-weight:600}"
            ".n{text-anchor:middle;font-size:11px}.a{text-anchor:middle;font-size:10px;fill:#6b7280}.l{font-size:11px}"
            "path{stroke:#3f4650;stroke-width:2}.bg{fill:#fff}.idle{fill:#f1f3f5}" + light,
            "@media(prefers-color-scheme:dark){text{fill:#e6e8eb}.a{fill:#9aa3ad}path{stroke:#c9d1d9}"
            ".bg{fill:#0d1117}.idle{fill:#1a2028}" + dark + "}",
            "</style>",
            f'<rect class="bg" width="{width}" height="{height}"/>',
            *body,
            "</svg>\n",
        ]
    )


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
