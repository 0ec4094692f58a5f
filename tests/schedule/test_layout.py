"""A layout is one value: comparable, printable, in JSON and back; the difference of two is data."""

from __future__ import annotations

import random

import pytest

from vpipe.errors import UserError
from vpipe.schedule.placement import (
    Drop,
    LayerTransfer,
    Layout,
    Reseated,
    Role,
    Seat,
    StageMember,
    difference,
    loop,
    replicated,
    two_ways,
    vee,
)


def test_it_prints_as_a_small_table() -> None:
    layout = Layout.of([3, 2], replicated([2, 1]), [Seat("a", "cuda:0"), Seat("b", "cuda:0"), Seat("a", "cuda:1")])
    assert str(layout).splitlines() == [
        "stage  layers  ranks  where",
        "0      0-2     0, 1   a b cuda:0",
        "1      3-4     2      a cuda:1",
    ]
    assert str(Layout.chain([1])).splitlines()[1] == "0      0       0      cpu"


def test_who_holds_what() -> None:
    layout = Layout.of([1, 2, 1, 1], vee(2))
    assert layout.bounds == ((0, 1), (1, 3), (3, 4), (4, 5))
    assert layout.stages == (0, 1, 1, 2, 3)
    assert [layout.ranks_of(layer) for layer in range(6)] == [(0,), (1,), (1,), (1,), (0,), (0,)]


def test_members_know_with_whom_they_share_a_stage() -> None:
    layout = Layout.of([1, 1], replicated([2, 1])).with_ranks([2, 0, 1])
    assert layout.members == ((StageMember(2, 0), StageMember(0, 1)), (StageMember(1),))
    assert [layout.member(0, rank).replica for rank in (2, 0)] == [0, 1]
    assert [layout.fellows(0, rank) for rank in (0, 2)] == [(2, 0), (2, 0)]
    assert layout.fellows(1, 1, Role.REPLICA) == (1,)
    assert layout.circles() == [(2, 0)]
    assert [layout.leader(stage) for stage in range(2)] == [2, 1]
    assert [layout.stages_of(rank) for rank in range(3)] == [(0,), (1,), (0,)]
    assert Layout.of([1, 1, 1, 1], two_ways(4)).circles() == [(0, 3), (1, 2), (2, 1), (3, 0)]


def test_impossible_layouts_are_refused_in_words() -> None:
    with pytest.raises(UserError, match=r"\[2, 0\] has an empty stage"):
        Layout.chain([2, 0])
    with pytest.raises(UserError, match="has 3 stages, but ranks are given for 2"):
        Layout.of([1, 1, 1], loop(2))
    with pytest.raises(UserError, match="covers 5 layers, but the layout has 4"):
        Layout.chain([2, 2]).with_counts([2, 3])
    with pytest.raises(UserError, match="no order of the ranks"):
        Layout.chain([2, 2]).with_ranks([0, 0])


def test_the_difference_of_two_layouts() -> None:
    old = Layout.of([2, 2], replicated([2, 1]))
    found = difference(old, old.with_counts([1, 3]))
    assert found.transfers == (LayerTransfer(1, (0, 1), (2,)),)
    assert found.drops == (Drop(1, (0, 1)),)
    assert str(found) == "layer 1: ranks 0, 1 → rank 2\nlayer 1: dropped by ranks 0, 1"
    assert not difference(old, old)
    assert str(difference(old, old)) == "nothing moves"
    with pytest.raises(UserError, match="another model"):
        difference(old, Layout.chain([1, 1]))


def test_a_rank_on_another_device_is_a_difference() -> None:
    seats = [Seat("a", "cuda:0"), Seat("a", "cuda:1")]
    old = Layout.of([2, 2], loop(2), seats)
    new = Layout.of([2, 2], loop(2), [seats[0], Seat("b", "cuda:0")])
    found = difference(old, new)
    assert old != new
    assert found
    assert found.reseated == (Reseated(1, seats[1], Seat("b", "cuda:0")),)
    assert str(found) == "rank 1: a cuda:1 → b cuda:0"
    assert not difference(old, Layout.of([2, 2], loop(2), seats))
    assert not difference(old, Layout.of([2, 1, 1], loop(3), [*seats, Seat("b")])).reseated, (
        "a rank that comes moves nobody"
    )


def test_carrying_out_a_difference_leads_to_the_new_layout() -> None:
    """Brute force: what every rank holds, after each transfer and drop is done by hand."""
    chance = random.Random(4)
    for _ in range(200):
        stages = chance.randint(1, 4)
        placement = replicated([chance.randint(1, 2) for _ in range(stages)])
        cuts = sorted(chance.sample(range(1, 9), stages - 1))
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, 9], strict=True)]
        ranks = chance.sample(range(placement.num_ranks), placement.num_ranks)
        old = Layout.of([9 - stages + 1, *[1] * (stages - 1)], placement)
        new = old.with_counts(counts).with_ranks(ranks)
        held = {rank: {layer for layer in range(9) if rank in old.ranks_of(layer)} for rank in range(old.num_ranks)}
        found = difference(old, new)
        for transfer in found.transfers:
            assert all(transfer.layer in held[rank] for rank in transfer.sources)
            for rank in transfer.targets:
                assert transfer.layer not in held[rank]
                held[rank].add(transfer.layer)
        for drop in found.drops:
            for rank in drop.ranks:
                held[rank].remove(drop.layer)
        assert held == {
            rank: {layer for layer in range(9) if rank in new.ranks_of(layer)} for rank in range(new.num_ranks)
        }
