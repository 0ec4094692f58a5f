"""The picture of a simulated program as SVG: time from left to right, one line per rank.

It follows the light or dark scheme of the page it stands on, unless it is for paper. A box is an action, with its kind
and microbatch; of several stages on a rank the later ones are paler. What takes no time (an update without a cost) is a
line. Kinds differ in colour, in texture and by their letter, so that they can be told apart in greyscale and by colour-
blind eyes.
"""

from __future__ import annotations

from collections.abc import Collection
from html import escape
from math import ceil
from typing import NamedTuple

from vpipe.schedule.action import Kind
from vpipe.schedule.draw import figures
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import DRAWN, NAMES, TRAITS
from vpipe.schedule.simulate import Simulation, Span

ROW, GAP, MARGIN, HEAD, FOOT = 24, 4, 62, 34, 52
MAX_WIDTH = 1180
STYLE = """
text{font:12px ui-sans-serif,system-ui,'DejaVu Sans',sans-serif;fill:#24292f}
.t{font-size:14px;font-weight:600}.n{text-anchor:middle;font-size:11px}.l,.f{font-size:11px}
.a{text-anchor:middle;font-size:10px}.a,.f{fill:#6b7280}
path{stroke:#3f4650;stroke-width:2}
pattern path{stroke:#000;stroke-opacity:.15;stroke-width:1}.page{fill:#fff}.idle{fill:#f1f3f5}"""
DARK = """
text{fill:#e6e8eb}.a,.f{fill:#9aa3ad}path{stroke:#c9d1d9}
pattern path{stroke:#fff;stroke-opacity:.2}.page{fill:#0d1117}.idle{fill:#1a2028}"""


class Paper(NamedTuple):
    """What a figure of a document wants: a width in centimetres, a font, and no dark scheme."""

    width: float | None = None
    font: str | None = None


def svg(simulation: Simulation, title: str | None, paper: Paper | None = None) -> str:
    """The document; on ``paper`` it is light, whatever the reader's screen."""
    program, spans = simulation.program, simulation.spans
    shortest = min((each.end - each.begin for row in spans for each in row if each.end > each.begin), default=1.0)
    origin = min((row[0].begin for row in spans if row), default=0.0)
    length = max(simulation.makespan, 1e-12)
    scale = min(24 / shortest, (MAX_WIDTH - MARGIN - 16) / length)
    foot = HEAD + program.num_ranks * (ROW + GAP) + 14
    body = [f'<text class="t" x="12" y="21">{escape(title)}</text>'] if title is not None else []
    for rank, row in enumerate(spans):
        top = HEAD + rank * (ROW + GAP)
        body.append(f'<text x="12" y="{top + 16}">rank {rank}</text>')
        body.append(_rectangle("idle", MARGIN, top, length * scale))
        body += [_box(program, rank, span, MARGIN + (span.begin - origin) * scale, top, scale) for span in row]
    body += _axis(length, scale, foot)
    body += _key(simulation, foot + 22)
    body.append(f'<text class="f" x="{MARGIN}" y="{foot + 41}">{figures(simulation)}</text>')
    kinds = {span.action.kind for row in spans for span in row}
    return _document(max(ceil(MARGIN + length * scale + 16), 560), foot + FOOT, title, body, kinds, paper)


def _rectangle(kind: str, left: float, top: float, width: float, more: str = "", inside: str = "") -> str:
    place = f'x="{_number(left)}" y="{top}" width="{_number(width)}" height="{ROW}"'
    return f'<rect class="{kind}" {place} rx="2"{more}' + (f">{inside}</rect>" if inside else "/>")


def _box(program: Program, rank: int, span: Span, left: float, top: int, scale: float) -> str:
    action = span.action
    if span.end <= span.begin:
        return f'<path d="M{_number(left)} {top}v{ROW}"><title>{action} at {span.begin:g}</title></path>'
    stages = program.placement.stages_of[rank]
    chunk = stages.index(action.stage)
    width = max((span.end - span.begin) * scale - 1, 0.4)
    shade = f' fill-opacity="{1 - 0.62 * chunk / (len(stages) - 1):.2f}"' if chunk else ""
    hint = f"<title>{action}: {span.begin:g} to {span.end:g}</title>"
    box = _rectangle(f"k{action.kind}", left, top, width, shade, hint)
    number = "" if action.microbatch < 0 else str(action.microbatch)
    words = next((each for each in (f"{action.kind}{number}", number) if each and width >= 6.5 * len(each) + 2), "")
    return box + (f'<text class="n" x="{_number(left + width / 2)}" y="{top + 16}">{words}</text>' if number else "")


def _axis(length: float, scale: float, top: int) -> list[str]:
    """Round numbers of time below the picture."""
    steps = (factor * 10.0**power for power in range(-9, 12) for factor in (1, 2, 5))
    step = next((step for step in steps if step * scale >= 44), length)
    return [
        f'<text class="a" x="{_number(MARGIN + number * step * scale)}" y="{top}">{number * step:g}</text>'
        for number in range(int(length / step + 1e-9) + 1)
    ]


def _key(simulation: Simulation, top: int) -> list[str]:
    """What the colours mean."""
    seen = {span.action.kind: span.end > span.begin for row in simulation.spans for span in row}
    drawn, left = [], float(MARGIN)
    for kind in (kind for kind in NAMES if kind in seen):
        box = f'<rect class="k{kind}" x="{_number(left)}" y="{top - 10}" width="12" height="12" rx="2"/>'
        drawn.append(box if seen[kind] else f'<path d="M{_number(left + 6)} {top - 11}v14"/>')
        drawn.append(f'<text class="l" x="{_number(left + 17)}" y="{top}">{NAMES[kind]}</text>')
        left += 34 + 6.2 * len(NAMES[kind])
    if any(len(stages) > 1 for stages in simulation.program.placement.stages_of):
        drawn.append(f'<text class="l" x="{_number(left)}" y="{top}">paler: later stages of a rank</text>')
    return drawn


def _document(
    width: int, height: int, title: str | None, body: list[str], kinds: Collection[Kind], paper: Paper | None
) -> str:
    drawn = {kind: trait.fills for kind, trait in DRAWN.items() if kind in kinds}
    light, dark = ("".join(f".c{kind}{{fill:{fill[scheme]}}}" for kind, fill in drawn.items()) for scheme in (0, 1))
    box = f'viewBox="0 0 {width} {height}"'
    if paper is not None and paper.width is not None:
        size = f'{box} width="{paper.width:g}cm" height="{paper.width * height / width:.4g}cm"'
    else:
        size = f'{box} width="{width}" height="{height}"'
    font = f"\ntext{{font-family:'{escape(paper.font)}'}}" if paper is not None and paper.font is not None else ""
    switch = "" if paper is not None else f"\n@media(prefers-color-scheme:dark){{{DARK}\n{dark}}}"
    name = [f"<title>{escape(title)}</title>"] if title is not None else []
    patterns = "".join(map(_pattern, drawn))
    fills = "".join(f".k{kind}{{fill:url(#p{kind})}}" for kind in drawn)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            *name,
            f"<style>{STYLE}{font}\n{fills}\n{light}{switch}</style>",
            f"<defs>{patterns}</defs>",
            f'<rect class="page" width="{width}" height="{height}"/>',
            *body,
            "</svg>\n",
        ]
    )


def _pattern(kind: Kind) -> str:
    """The fill of a kind: its colour, and its texture over it."""
    lines = f'<path d="{TRAITS[kind].texture}"/>' if TRAITS[kind].texture else ""
    square = 'width="6" height="6"'
    box = f'<rect class="c{kind}" {square}/>'
    return f'<pattern id="p{kind}" {square} patternUnits="userSpaceOnUse">{box}{lines}</pattern>'


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
