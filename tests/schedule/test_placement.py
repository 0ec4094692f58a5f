"""Where stages live."""

from __future__ import annotations

import pytest

from vpipe.schedule.placement import Placement, loop, replicated, vee, zigzag


def test_the_picture_in_the_docstring() -> None:
    assert loop(2, 2).stages_of == ((0, 2), (1, 3))
    assert vee(2).stages_of == ((0, 3), (1, 2))
    assert zigzag(2, 2).stages_of == ((0, 3, 4, 7), (1, 2, 5, 6))


def test_replicas_take_units_in_turn() -> None:
    placement = replicated([2, 1, 3])
    assert placement.ranks_of == ((0, 1), (2,), (3, 4, 5))
    assert (placement.num_ranks, placement.num_stages, placement.period, placement.has_replicas) == (6, 3, 6, True)
    assert [placement.rank(2, unit) for unit in range(4)] == [3, 4, 5, 3]
    assert list(placement.units(0, 1, 6)) == [1, 3, 5]


@pytest.mark.parametrize("ranks_of", [(), ((1,),), ((0,), (2,))])
def test_gaps_are_refused(ranks_of: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="without a gap"):
        Placement(ranks_of)
