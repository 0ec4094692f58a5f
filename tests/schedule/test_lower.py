"""Lowering: every pass on its own, and what the whole promises for every schedule."""

from __future__ import annotations

import pytest

from vpipe.schedule.action import Action, Kind
from vpipe.schedule.authors.authoring import Entry
from vpipe.schedule.catalog import build, entries
from vpipe.schedule.lower import communicate, is_lowered, lower, recompute, reduce, swap
from vpipe.schedule.placement import loop
from vpipe.schedule.program import Program, from_csv, to_csv
from vpipe.schedule.semantics import COMMUNICATION
from vpipe.schedule.verify import verify

ADDED = COMMUNICATION | {Kind.REDUCE, Kind.R, Kind.OUT, Kind.IN}


def test_1f1b_of_two_ranks_on_paper() -> None:
    """0RECV_B0 stands before 0F0: rank 1 could send as soon as it has seen 0F0, and must never wait."""
    lowered = lower(build("1f1b", 2, 2), post_ahead=1)
    assert to_csv(lowered).splitlines() == [
        "0RECV_B0,0F0,0SEND_F0,0RECV_B1,0F1,0SEND_F1,0B0,0B1,0STEP",
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1STEP",
    ]


def test_1f1b_of_two_ranks_whose_receives_block_on_paper() -> None:
    """0RECV_B0 stands behind 0SEND_F0: rank 1 cannot send before it has that."""
    lowered = lower(build("1f1b", 2, 2), receives_block=True)
    assert to_csv(lowered).splitlines() == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0STEP",
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1STEP",
    ]


def ends_where_transfers_wait(program: Program) -> bool:
    """Each rank waits at a receive until all of it has been sent, and at a send until the next stage receives it."""
    edges = {(s, s + 1) for s in range(program.num_stages - 1)} | program.skips
    sends: dict[Action, Action] = {}
    takes: dict[Action, set[Action]] = {}
    for writer, reader in edges:
        for k in range(program.num_microbatches):
            if program.placement.rank(writer, k) != program.placement.rank(reader, k):
                for kinds, here, there in (
                    ((Kind.SEND_F, Kind.RECV_F), writer, reader),
                    ((Kind.SEND_B, Kind.RECV_B), reader, writer),
                ):
                    send, receive = Action(here, kinds[0], k), Action(there, kinds[1], k)
                    takes.setdefault(receive, set()).add(send)
                    if reader == writer + 1:
                        sends[send] = receive
    left, come, moved = [list(row) for row in program.rows], set[Action](), True
    while moved:
        moved = False
        for row in left:
            while row:
                come.add(row[0])
                if not takes.get(row[0], set()) <= come or sends.get(row[0], row[0]) not in come:
                    break
                row.pop(0)
                moved = True
    return not any(left)


@pytest.mark.parametrize("skips", [False, True], ids=["chain", "skips"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_receives_may_block_their_ranks(entry: Entry, num_ranks: int, skips: bool) -> None:
    """Where anything waits for a whole device, receives that are posted are among it. A receive that is posted before
    own work which its sender needs hangs then: the usual lowering has some, and the verifier says where."""
    program = entry.build(num_ranks, 2 * num_ranks)
    far = {(0, program.num_stages - 1), (0, 2)} if skips and program.num_stages > 2 else set()
    program = Program(program.rows, program.placement, program.num_microbatches, program.versions, frozenset(far))
    lowered = lower(program, receives_block=True)
    assert ends_where_transfers_wait(lowered)
    assert not verify(lowered, receives_block=True)
    assert lowered.with_rows([a for a in row if a.kind not in ADDED] for row in lowered.rows) == program
    assert not ends_where_transfers_wait(lower(program))
    assert "deadlock" in str(verify(lower(program), receives_block=True)[0])


@pytest.mark.parametrize("post_ahead", [0, 1, 2, 7])
@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_pass_keeps_the_order_and_verifies(entry: Entry, post_ahead: int) -> None:
    program = entry.build(4, 8)
    stages = range(0, program.num_stages, 2)
    recomputed = recompute(program, stages)
    swapped = swap(recomputed, stages)
    lowered = communicate(reduce(swapped), post_ahead)
    for each in (recomputed, swapped, lowered, lower(program, post_ahead=post_ahead)):
        assert each.with_rows([a for a in row if a.kind not in ADDED] for row in each.rows) == program
        assert not verify(each)
    assert is_lowered(lowered)
    assert not is_lowered(program)


def test_recompute_stands_before_the_input_gradient() -> None:
    row = recompute(build("zb-h1", 2, 2), [1]).rows[1]
    assert [str(a) for a in row if a.kind in (Kind.R, Kind.I)] == ["1R0", "1I0", "1R1", "1I1"]


def test_swap_leaves_out_what_comes_back_at_once() -> None:
    rows = swap(build("1f1b", 4, 8), range(4)).rows
    assert any(a.kind is Kind.OUT for a in rows[0])
    assert not any(a.kind is Kind.OUT for a in rows[3]), "the last rank runs each backward right after its forward"


def test_reduce_only_where_there_are_replicas_and_only_once() -> None:
    program = build("pipedream", 3, 4, replicas=[2, 1])
    reduced = reduce(program)
    assert sum(a.kind is Kind.REDUCE for _, a in reduced.actions()) == 4
    assert all(a.stage == 0 for _, a in reduced.actions() if a.kind is Kind.REDUCE)
    assert reduce(reduced) == reduced


def test_a_skip_is_sent_directly_and_received_with_the_rest() -> None:
    program = build("1f1b", 3, 2)
    skipping = Program(program.rows, program.placement, 2, skips=frozenset({(0, 2)}))
    lowered = lower(skipping)
    assert not verify(lowered)
    assert lowered.rows[2].count(Action(2, Kind.RECV_F, 0)) == 1


def test_two_ranks_that_send_to_each_other_do_not_hang() -> None:
    """Bug: with two stages a rank both ranks sent before either had posted its receive."""
    csv = "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1\n"
    program = from_csv(csv)
    assert program.placement == loop(2, 2)
    assert not verify(program)
