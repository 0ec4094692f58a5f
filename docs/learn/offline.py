"""Writes the playground as one file that needs no server: python docs/learn/offline.py playground.html

A browser cannot run the catalogue, so the page carries what it builds for every count up to ``Most``, and times it
itself (``pipes.js``). A row is packed as one letter per action: its kind, and which of its rank's stages it is of. The
number of the microbatch follows only where it is not the next one of that stage and kind. Almost four thousand programs
are then less than 60 kB.

The course needs this page: it stands in a frame of each of its pages, and costs and actions are changed there by hand,
which no answer that was computed before can follow. So rules of ``schedule/`` are stated a second time in ``pipes.js``,
outside the package; a test compares them with the simulator on hundreds of programs. ``vpipe playground`` asks its
server.
"""

from __future__ import annotations

import sys
import zlib
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from vpipe.errors import UserError
from vpipe.observe import page_html, whatif
from vpipe.observe.playground_look import look
from vpipe.schedule.action import Kind
from vpipe.schedule.catalog import Entry, get
from vpipe.schedule.placement import Placement, loop, two_ways, zigzag
from vpipe.schedule.program import Program, Versions

HERE = Path(__file__).parent
SCRIPTS = ("dom.js", "timeline.js", "charts.js", "panels.js", HERE / "pipes.js", HERE / "offline.js", "playground.js")
FIRST_LETTER = {Kind.F: "a", Kind.B: "i", Kind.I: "q", Kind.W: "A", Kind.STEP: "I"}
"""Kind → the letter of its rank's first stage; ``pipes.js`` has the same table."""


class Most(NamedTuple):
    """Up to which counts the page has programs."""

    ranks: int = 8
    microbatches: int = 16
    stages: int = 4


def page(most: Most | None = None) -> str:
    """The file."""
    return page_html.document("playground", SCRIPTS, data(most))


def data(most: Most | None = None, names: list[str] | None = None) -> dict[str, Any]:
    """What the page carries. A schedule that is made for given costs (zb-auto) is not there: it differs with each."""
    most = most or Most()
    chosen = [each for each in whatif.choices() if names is None or each["name"] in names]
    chosen = [each for each in chosen if not get(each["name"]).takes_costs]
    texts: list[str] = []
    refusals: list[str] = []
    schedules = []
    for choice in chosen:
        entry, first = get(choice["name"]), len(texts)
        built = [_built(entry, p, m, v) for v, p, m in _counts(entry, most)]
        texts += [_text(each, refusals) for each in built]
        programs = [each for each in built if isinstance(each, Program)]
        delayed = any(each.versions is Versions.DELAYED for each in programs)
        traits = {"first": first, "placement": _placement(programs), "delayed": delayed}
        schedules.append(choice | traits | {"blocking": entry.blocking, "asynchronous": entry.asynchronous})
    packed = b64encode(zlib.compress("\n".join(texts).encode(), 9)).decode()
    return {"schedules": schedules, "most": most._asdict(), "refusals": refusals, "programs": packed, **look()}


def _counts(entry: Entry, most: Most) -> list[tuple[int | None, int, int]]:
    """(v, p, m) in the order in which the page looks them up."""
    stages = range(1, most.stages + 1) if entry.any_stages_per_rank else (None,)
    return [(v, p, m) for v in stages for p in range(1, most.ranks + 1) for m in range(1, most.microbatches + 1)]


def _built(entry: Entry, p: int, m: int, v: int | None) -> Program | str:
    try:
        return entry.build(p, m, v)
    except UserError as error:
        return str(error)


def _text(built: Program | str, refusals: list[str]) -> str:
    """A program packed, or ``!`` and the number of the sentence that refuses it."""
    if isinstance(built, Program):
        return pack(built)
    if built not in refusals:
        refusals.append(built)
    return f"!{refusals.index(built)}"


def pack(program: Program) -> str:
    """The rows, with ``|`` between."""
    placement = program.placement
    packed = []
    for rank, row in enumerate(program.rows):
        place = {stage: number for number, stage in enumerate(placement.stages_of[rank])}
        following: dict[tuple[int, Kind], int] = {}
        letters = []
        for stage, kind, microbatch in row:
            ranks = placement.ranks_of[stage]
            expected = following.get((stage, kind), ranks.index(rank))
            letter = chr(ord(FIRST_LETTER[kind]) + place[stage])
            letters.append(letter if microbatch in (expected, -1) else f"{letter}{microbatch}")
            following[stage, kind] = microbatch + len(ranks)
        packed.append("".join(letters))
    return "|".join(packed)


def _placement(programs: list[Program]) -> str:
    """Which of the page's placements a schedule has, for all its counts."""
    forms: dict[str, Callable[[int, int], Placement]] = {
        "loop": loop,
        "zigzag": lambda p, v: zigzag(p, max(1, v // 2)),
        "two_ways": lambda p, v: two_ways(p),
    }
    for name, form in forms.items():
        if all(each.placement == form(each.num_ranks, each.num_stages // each.num_ranks) for each in programs):
            return name
    raise ValueError("the page knows loops, waves and two ways; this schedule has another placement")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("python docs/learn/offline.py FILE.html")
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {sys.argv[1]}: open it in a browser, no server is needed\n")
