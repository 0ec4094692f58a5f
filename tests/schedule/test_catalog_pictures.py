"""The picture in a family's docstring is what its function writes, drawn at F = I = W = 1."""

from __future__ import annotations

import pytest

from vpipe.schedule import draw
from vpipe.schedule.action import Kind
from vpipe.schedule.authors import chimera, dualpipe, gpipe, one_f_one_b, v_shape, wave, zero_bubble
from vpipe.schedule.program import Program
from vpipe.schedule.simulate import simulate


def drawn(program: Program, with_stage: bool) -> list[str]:
    """One line per rank, one cell per time slot: ``F0``, or ``f0`` for a second stage, or ``3F0`` with the stage."""
    v = program.num_stages // program.num_ranks
    lines = []
    for rank, spans in enumerate(simulate(program).spans):
        cells: dict[int, str] = {}
        for span in spans:
            stage, kind, microbatch = span.action
            letter = kind.lower() if stage >= program.num_ranks and not with_stage else str(kind)
            name = f"{stage if with_stage else ''}{letter}{microbatch}"
            cells.update((slot, name) for slot in range(round(span.begin * v), round(span.end * v)))
        width = 3 if with_stage else 2
        row = " ".join(cells.get(slot, ".").ljust(width) for slot in range(max(cells) + 1))
        lines.append(f"rank {rank}   {row}".rstrip())
    return lines


@pytest.mark.parametrize(
    ("module", "program", "with_stage"),
    [
        (gpipe, gpipe.gpipe(3, 4), False),
        (one_f_one_b, one_f_one_b.one_f_one_b(3, 4), False),
        (zero_bubble, zero_bubble.zb_h1(3, 4), False),
        (v_shape, v_shape.zb_v(2, 4), False),
        (dualpipe, dualpipe.dualpipe_v(2, 4), False),
        (wave, wave.hanayo(2, 2), True),
    ],
)
def test_the_docstring_shows_the_schedule(module, program, with_stage):
    assert Kind.F in {action.kind for _, action in program.actions()}
    shown = [line.rstrip() for line in module.__doc__.splitlines()]
    for line in drawn(program, with_stage):
        assert any(each.endswith(line) for each in shown), line


def test_chimeras_picture() -> None:
    picture = draw.text(simulate(chimera.chimera(4, 4))).splitlines()[:4]
    assert chimera.__doc__ is not None
    drawn_there = [line.removeprefix("    p = 4, m = 4").strip() for line in chimera.__doc__.splitlines()]
    assert [line for line in drawn_there if line.startswith("rank ")] == picture
