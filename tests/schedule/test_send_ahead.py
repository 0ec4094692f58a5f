"""Gradients sent ahead: a stage's share of REDUCE passes beside the backwards of the rank's other stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vpipe.schedule.action import Action, Kind, parse
from vpipe.schedule.batch import ProgramGraph
from vpipe.schedule.catalog import build, entries
from vpipe.schedule.lower import agree, lower, send_ahead
from vpipe.schedule.placement import Placement
from vpipe.schedule.program import Program, from_csv, to_csv
from vpipe.schedule.replicas import replicate
from vpipe.schedule.semantics import Round, members, sent_ahead
from vpipe.schedule.simulate import simulate
from vpipe.schedule.timeline import Costs, price_tables, uniform
from vpipe.schedule.verify import verify

REPLICATED = [entry.name for entry in entries() if not entry.asynchronous]


def late(name: str, stages_per_rank: int | None = None) -> Program:
    program = build(name, 4, 8, stages_per_rank)
    return agree(lower(program if program.placement.has_replicas else replicate(program, 2)))


def with_reduce(program: Program, seconds: float) -> Costs:
    return Costs(tuple(replace(each, reduce=seconds) for each in uniform(program.placement).stages))


def test_where_it_stands() -> None:
    """Behind the last gradient of the stage and its message, ahead of what the rank still computes."""
    program = send_ahead(agree(lower(replicate(build("interleaved", 2, 2, 2), 2))))
    row = " ".join(str(action) for action in program.rows[1] if action.kind not in (Kind.RECV_F, Kind.RECV_B))
    assert row.endswith("3B2 3SEND_B2 3SEND_W 1B0 1SEND_B0 1B2 1SEND_B2 1REDUCE 3REDUCE 1AGREE 1STEP 3STEP")
    assert members(program, Action(3, Kind.SEND_W)) == (1, 3)
    assert sent_ahead(program)[Round(Kind.REDUCE, 3, 0)].keys() == {1, 3}
    assert from_csv(to_csv(program)) == program
    assert send_ahead(program) == program


@pytest.mark.parametrize("name", REPLICATED)
def test_every_schedule_verifies_and_is_never_slower(name: str) -> None:
    before = late(name)
    after = send_ahead(before)
    assert not verify(after)
    sends = sum(action.kind is Kind.SEND_W for _, action in after.actions())
    assert len(after) == len(before) + sends
    costs = with_reduce(before, 0.5)
    assert simulate(after, costs).makespan <= simulate(before, costs).makespan
    several = any(len(stages) > 1 for stages in before.placement.stages_of)
    assert (sends > 0) == several, "one stage has nothing to pass beside"


@pytest.mark.parametrize(("stages_per_rank", "hidden"), [(2, 1), (4, 3)])
def test_all_but_the_last_stage_of_a_rank_is_hidden(stages_per_rank: int, hidden: int) -> None:
    before = late("interleaved", stages_per_rank)
    costs, seconds = with_reduce(before, 0.25), 0.25
    gained = simulate(before, costs).makespan - simulate(send_ahead(before), costs).makespan
    assert gained == pytest.approx(hidden * seconds)


def test_the_graph_of_a_program_has_the_same_makespan() -> None:
    program = send_ahead(late("interleaved", 2))
    costs = with_reduce(program, 3.0)
    price, hop, lag = price_tables(costs)
    graph = ProgramGraph(program)
    table = graph.table(price[:, :, None], hop[:, :, None], lag)
    assert graph.makespans(table, lag).tolist() == [simulate(program, costs).makespan]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("0F0 0SEND_W 0B0 0REDUCE 0STEP", "comes between the 0SEND_W of its gradients and the 0REDUCE"),
        ("0F0 0B0 0SEND_W 0SEND_W 0REDUCE 0STEP", "sends what the other replicas have been sent already"),
        ("0F0 0B0 0REDUCE 0SEND_W 0STEP", "sends what the other replicas have been sent already"),
    ],
)
def test_the_law(row: str, expected: str) -> None:
    rows = [tuple(map(parse, text.split())) for text in (row, row.replace("0F0", "0F1").replace("0B0", "0B1"))]
    found = [str(each) for each in verify(Program(tuple(rows), Placement(((0, 1),)), 2))]
    assert any(expected in each for each in found), found


def test_all_replicas_send_or_none() -> None:
    rows = ("0F0 0B0 0SEND_W 0REDUCE 0STEP", "0F1 0B1 0REDUCE 0STEP")
    program = Program(tuple(tuple(map(parse, row.split())) for row in rows), Placement(((0, 1),)), 2)
    assert [str(each) for each in verify(program)] == [
        "rank 0, 0SEND_W: runs 1 times on rank 0 and 0 times on rank 1: the replicas would differ"
    ]
    alone = Program((tuple(map(parse, ("0F0", "0B0", "0SEND_W", "0STEP"))),), Placement(((0,),)), 1)
    assert "stage 0 has no other replica to send gradients to" in str(verify(alone)[0])
