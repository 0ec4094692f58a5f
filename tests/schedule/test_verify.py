"""verify in words: each kind of violation, its place and its reason. (test_mutation shows that none is missed.)"""

from __future__ import annotations

import pytest

from vpipe.schedule.action import parse
from vpipe.schedule.catalog import build
from vpipe.schedule.grid import around
from vpipe.schedule.lower import lower
from vpipe.schedule.placement import two_ways
from vpipe.schedule.program import Program, Versions, cells, from_csv, to_csv
from vpipe.schedule.verify import verify


def changed(program: Program, *changes: tuple[str, str]) -> Program:
    """``program`` with text replaced in its CSV; the placement stays."""
    text = to_csv(program)
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after, 1)
    return program.with_rows([action for _, action in row] for row in cells(text))


ONE = build("1f1b", 3, 4)
TWO = build("pipedream", 3, 4)
LOW = lower(ONE)


@pytest.mark.parametrize(
    ("program", "rank", "action", "reason"),
    [
        (changed(ONE, ("1F2,", "")), 1, "", "the forward of microbatch 2 at stage 1 (1F2) is missing"),
        (changed(ONE, ("1B2,", "")), 1, "", "must be one B, or I and W; the program has nothing"),
        (changed(ONE, ("1B2,", "1I2,")), 1, "", "must be one B, or I and W; the program has 1I2"),
        (changed(ONE, ("1B2,", "1B2,1B2,")), 1, "1B2", "runs twice"),
        (changed(ONE, ("1B2,", "2B2,")), 1, "2B2", "belongs on rank 2"),
        (changed(ONE, ("2F3", "2F9")), 2, "2F9", "there is no microbatch 9: the program has 0..3"),
        (changed(ONE, ("2F3", "5F3")), 2, "5F3", "there is no stage 5: the program has stages 0..2"),
        (changed(TWO, ("0F0,0F1", "0F1,0F0")), 0, "0F0", "runs after 0F1, but where stages update several times"),
        (changed(ONE, ("2F0,2B0", "2B0,2F0")), 2, "2B0", "needs 2F0, which comes later in the row"),
        (changed(ONE, ("0B2,0B3,0STEP", "0B2,0STEP,0B3")), 0, "", "no 0STEP follows 0B3"),
        (changed(ONE, ("0B3,0STEP", "0B3,0STEP,0STEP")), 0, "0STEP", "stage 0 has no new gradient to apply"),
        (changed(LOW, ("1SEND_F2,", "")), 2, "2RECV_F2", "has no counterpart: 1SEND_F2 is missing"),
        (changed(LOW, ("2RECV_F2,", "")), 2, "2F2", "needs 2RECV_F2, which no rank runs"),
        (changed(LOW, ("2RECV_F0,", ""), ("2RECV_F1", "2RECV_F1,2RECV_F0")), 2, "2RECV_F1", "takes message 0 from"),
    ],
)  # fmt: skip
def test_each_violation_in_words(program: Program, rank: int, action: str, reason: str) -> None:
    found = verify(program)
    assert any((each.rank, each.action) == (rank, action) and reason in each.reason for each in found), found


def test_all_violations_not_the_first() -> None:
    found = verify(changed(ONE, ("1F2,", ""), ("2B3,", ""), ("0B0,", "0B0,0B0,")))
    assert {0, 1, 2} <= {each.rank for each in found}
    assert found == sorted(found)


def test_two_ranks_that_send_before_they_post_deadlock() -> None:
    crossed = from_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    found = verify(crossed)
    assert [each.action for each in found] == ["0SEND_F1", "1SEND_B0"]
    assert found[0].reason == "deadlock: waits for ever for 1RECV_F1 to be posted"


def test_memory_bound() -> None:
    assert verify(build("1f1b", 4, 8), max_activations=4) == []
    (found,) = verify(build("1f1b", 4, 8), max_activations=3)
    assert str(found) == "rank 0: holds the activations of 4 microbatches, more than the bound of 3"


def test_a_unit_may_not_read_older_weights_than_its_neighbours() -> None:
    program = build("pipedream", 2, 8)
    assert any("out of step" in each.reason for each in verify(changed(program, ("1STEP,1F3", "1F3,1STEP"))))


def test_a_replica_may_not_step_alone() -> None:
    program = lower(build("pipedream", 3, 4, replicas=[2, 1]))
    found = verify(changed(program, ("0REDUCE,", "")))
    assert any("0REDUCE" in each.action for each in found)


def test_weights_that_are_not_made_yet() -> None:
    assert verify(build("pipedream-2bw", 2, 2, num_batches=3)) == []
    program = build("pipedream", 3, 8)  # updates after every unit: two versions are not enough for three ranks
    found = verify(Program(program.rows, program.placement, 8, Versions.DELAYED))
    assert found[0].reason == "reads weight version 1, but stage 0 has made 0 updates"


def test_forward_only_programs_are_valid() -> None:
    assert verify(from_csv("0F0,0F1\n1F0,1F1\n")) == []


def test_the_grid_marks_the_culprit() -> None:
    program = changed(ONE, ("1B2,", "1B2,1B2,"))
    found = verify(program)
    picture = around(program, found[0], found)
    assert picture.splitlines()[2].split()[-3:] == [">1B2<", "1B3", "1STEP"]
    assert len(picture.splitlines()) == 4


def test_two_ranks_that_send_at_the_same_moment_and_post_afterwards_hang() -> None:
    """Both sends block, and neither receive is posted."""
    rows = (
        "0F0 0SEND_F0 1RECV_F1 1F1 1B1 1SEND_B1 0RECV_B0 0B0",
        "0F1 0SEND_F1 1RECV_F0 1F0 1B0 1SEND_B0 0RECV_B1 0B1",
    )
    program = Program(tuple(tuple(map(parse, row.split())) for row in rows), two_ways(2), 2)
    found = verify(program)
    assert {violation.action for violation in found} == {"0SEND_F0", "0SEND_F1"}
    assert all("deadlock" in violation.reason for violation in found)
