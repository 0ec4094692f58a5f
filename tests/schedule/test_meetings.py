"""Meetings are actions with members: who comes, in which order, and what a deadlock through them is called."""

from __future__ import annotations

import pytest

from vpipe.schedule.action import Action, Kind, parse
from vpipe.schedule.catalog import build
from vpipe.schedule.lower import agree, lower
from vpipe.schedule.placement import Placement
from vpipe.schedule.program import Program, from_csv, to_csv
from vpipe.schedule.replicas import replicate
from vpipe.schedule.semantics import MEETINGS, Round, members, rounds
from vpipe.schedule.simulate import simulate
from vpipe.schedule.timeline import Costs, StageCosts
from vpipe.schedule.verify import executable, verify


def program(*rows: str, ranks_of: tuple[tuple[int, ...], ...], m: int) -> Program:
    return Program(tuple(tuple(map(parse, row.split())) for row in rows), Placement(ranks_of), m)


def reasons(given: Program) -> list[str]:
    return [str(each) for each in verify(given)]


def test_who_meets() -> None:
    lowered = agree(lower(build("chimera", 4, 4)))
    assert {Kind.REDUCE, Kind.AGREE} == MEETINGS
    assert members(lowered, Action(1, Kind.REDUCE)) == (1, 2)
    assert members(lowered, Action(0, Kind.AGREE)) == (0, 1, 2, 3)
    found = rounds(lowered)
    assert set(found[Round(Kind.REDUCE, 3, 0)]) == {0, 3}
    assert set(found[Round(Kind.AGREE, -1, 0)]) == {0, 1, 2, 3}
    assert from_csv(to_csv(lowered)) == lowered
    assert agree(lowered) == lowered


def test_members_of_a_communicator_meet_in_the_same_order() -> None:
    """Both ranks hold both stages. One adds up stage 0 first, the other stage 1: each would wait for the other."""
    rows = ("0F0 1F1 0B0 1B1 0REDUCE 1REDUCE 0STEP 1STEP", "1F0 0F1 1B0 0B1 1REDUCE 0REDUCE 0STEP 1STEP")
    found = reasons(program(*rows, ranks_of=((0, 1), (1, 0)), m=2))
    assert found == [
        "rank 1, action 4 (1REDUCE): comes to REDUCE 0 of stage 1 while rank 0 comes to REDUCE 0 of stage 0: members "
        "meet in the same order"
    ]


def test_a_deadlock_through_meetings_names_the_rows() -> None:
    """Three communicators of two ranks each, in a ring: every order is right by itself."""
    ring = program(
        "0F0 2F1 2B1 0B0 0REDUCE 2REDUCE 0STEP 2STEP",
        "1F0 0F1 1B0 0B1 1REDUCE 0REDUCE 0STEP 1STEP",
        "2F0 1F1 2B0 1B1 2REDUCE 1REDUCE 1STEP 2STEP",
        ranks_of=((0, 1), (1, 2), (2, 0)),
        m=2,
    )
    found = reasons(ring)
    assert len(found) == 3
    assert found[0] == (
        "rank 0, action 4 (0REDUCE): deadlock: waits for ever for rank 1, which stands at 1REDUCE "
        "(action 4) to come to REDUCE 0 of stage 0"
    )
    turned = ring.with_rows(
        [*ring.rows[:2], map(parse, ["2F0", "1F1", "2B0", "1B1", "1REDUCE", "2REDUCE", "1STEP", "2STEP"])]
    )
    assert not verify(turned)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("1AGREE,", ""), "waits for all ranks, but rank 1 never comes to AGREE 0"),
        (("0AGREE,0STEP", "0STEP,0AGREE"), "comes after an update: all ranks agree before the first of them updates"),
        (("0B1,0AGREE", "0AGREE,0B1"), "changes a gradient that the ranks have agreed on"),
        (("0AGREE", "0AGREE,0AGREE"), "agrees on what is agreed already"),
    ],
)
def test_an_agreement_in_the_wrong_place(changed: tuple[str, str], words: str) -> None:
    text = "0F0,0F1,0B0,0B1,0AGREE,0STEP\n1F0,1B0,1F1,1B1,1AGREE,1STEP\n"
    assert not verify(from_csv(text))
    assert any(words in each for each in reasons(from_csv(text.replace(*changed))))


def test_a_replica_that_stays_away_from_the_sum() -> None:
    """Of a program that says all itself; where lowering adds REDUCE it comes to both."""
    whole = agree(lower(replicate(build("1f1b", 2, 2), 2)))
    rows = [[each for each in row if (rank, each.kind) != (2, Kind.REDUCE)] for rank, row in enumerate(whole.rows)]
    found = reasons(whole.with_rows(rows))
    assert found == [
        "rank 0, action 8 (0REDUCE): waits for all replicas of stage 0, but rank 2 never comes to REDUCE 0 of stage 0",
        "rank 2, action 9 (0STEP): applies a gradient that the other replicas of stage 0 have not shared",
    ]


def test_a_rank_without_updates_is_told_so() -> None:
    """One rank has forgotten its STEP: verify says it, lowering does not stumble over it."""
    found = reasons(agree(lower(from_csv("0F0,0B0,0STEP\n1F0,1B0\n"))))
    assert any("no 1STEP follows 1B0" in each for each in found)
    assert any("rank 1 never comes to AGREE 0" in each for each in found)


def test_an_agreement_has_no_place_where_stages_update_one_by_one() -> None:
    found = reasons(from_csv("0F0,0B0,0AGREE,0STEP,0F1,0B1,0STEP"))
    assert any("they update several times, each on its own" in each for each in found)


def test_the_simulator_waits_for_the_last() -> None:
    """zb-h2's ranks end staggered; where they must agree, all update when the last has come."""
    costs = Costs((StageCosts(1, 1, 1, step=0.5),) * 4)
    free, bound = lower(build("zb-h2", 4, 8)), agree(lower(build("zb-h2", 4, 8)))
    begins = [[row[-1].begin for row in simulate(each, costs).spans] for each in (free, bound)]
    assert begins == [[24, 25, 26, 27], [27, 27, 27, 27]]
    assert simulate(free, costs).maxspan == 24.5
    assert simulate(bound, costs).maxspan == 27.5


def test_whoever_gives_the_price_of_updates_gets_the_agreement() -> None:
    """A program as its author wrote it is simulated as it runs; papers, which have no updates, keep their spans."""
    costs = Costs((StageCosts(1, 1, 1, step=4.0), *[StageCosts(1, 1, 1)] * 3))
    found = simulate(build("zb-h2", 4, 8), costs)
    assert found.makespan == 31
    assert found.program == executable(build("zb-h2", 4, 8), "zb-h2", agrees=True)
    assert simulate(build("zb-h2", 4, 8)).maxspan == 24
    for each in (build("pipedream", 4, 8), build("pipedream-2bw", 4, 8, num_batches=1)):
        assert Kind.AGREE not in simulate(each, costs).program.flat.kinds
