"""The picture of a simulated program for the terminal; ``svg`` draws the same for a page.

Time goes from left to right, one line per rank. A label is the kind and the microbatch. Where a rank holds two
stages, the first is upper case and the second lower case; where it holds more, a small figure counts them.

    rank 0  F0 F1 .     .     B0─── B1───
    rank 1  .  F0 B0─── F1 B1───
"""

from __future__ import annotations

from vpipe.schedule.program import Program
from vpipe.schedule.semantics import NAMES, TRAITS
from vpipe.schedule.simulate import Simulation, Span

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
            cells[column - start] = f"\x1b[30;{TRAITS[span.action.kind].colour}m{sign}\x1b[0m" if painted else sign
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
    seen = {span.action.kind for row in simulation.spans for span in row if span.end > span.begin}
    kinds = [kind for kind in NAMES if kind in seen]
    if colour:
        legend = "  ".join(f"\x1b[30;{TRAITS[kind].colour}m {kind} \x1b[0m {NAMES[kind]}" for kind in kinds)
    else:
        legend = "  ".join(f"{kind} {NAMES[kind]}" for kind in kinds) + "  · idle"
    return [legend, figures(simulation)]


def figures(simulation: Simulation) -> str:
    """What a reader looks for in the picture, in numbers."""
    peak = max(simulation.peak_activations, default=0)
    low, high = (f"{share:.0%}" for share in (min(simulation.utilisation), max(simulation.utilisation)))
    busy = f"ranks busy {low}" if low == high else f"ranks busy {low} to {high}"
    return f"makespan {simulation.makespan:g}, bubble {simulation.bubble:.1%}, {busy}, peak activations {peak:g}"
