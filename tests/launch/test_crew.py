"""Who trains with whom after a loss: the launcher's decisions, without processes."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path

from vpipe.launch.crew import Crew, MemberState
from vpipe.launch.elastic import Elastic, ElasticLaunch
from vpipe.launch.loop import Grace
from vpipe.launch.output import Output
from vpipe.rundir.crew import want


def running(num_ranks: int, least: int = 1, by: int = 1) -> Crew:
    crew = Crew(num_ranks, least, by)
    for slot in range(num_ranks):
        crew.started(slot)
        assert not crew.can_begin
    for slot in range(num_ranks):
        crew.ready(slot)
    assert crew.can_begin
    orders = crew.begin()
    assert {slot: order["rank"] for slot, order in orders.items()} == {slot: slot for slot in range(num_ranks)}
    return crew


def test_a_replacement_takes_the_rank_of_the_lost_one() -> None:
    crew = running(3)
    crew.gone(1)
    assert crew.interrupt("rank 1 was killed") == [0, 2]
    crew.started(1)
    for slot in (0, 2):
        crew.ready(slot)
        assert not crew.can_begin
    crew.ready(1)
    orders = crew.begin()
    assert {slot: (order["epoch"], order["rank"], order["num_ranks"]) for slot, order in orders.items()} == {
        0: (2, 0, 3),
        1: (2, 1, 3),
        2: (2, 2, 3),
    }
    assert orders[0]["lost"] == ["rank 1 was killed"]


def test_fewer_ranks_go_on_in_their_order() -> None:
    crew = running(4, least=2)
    crew.gone(0)
    for slot in crew.interrupt("rank 0 was killed"):
        crew.ready(slot)
    assert {slot: order["rank"] for slot, order in crew.begin().items()} == {1: 0, 2: 1, 3: 2}


def test_replicas_go_by_twos_and_the_third_waits_as_a_spare() -> None:
    crew = running(4, least=2, by=2)
    crew.gone(3)
    for slot in crew.interrupt("lost"):
        crew.ready(slot)
    assert sorted(crew.begin()) == [0, 1]
    assert crew.states[2] is MemberState.READY
    crew.gone(0)
    assert crew.interrupt("lost") == [1]
    crew.ready(1)
    assert {slot: order["rank"] for slot, order in crew.begin().items()} == {1: 0, 2: 1}


def test_too_few_do_not_begin() -> None:
    crew = running(3, least=3)
    crew.gone(2)
    for slot in crew.interrupt("lost"):
        crew.ready(slot)
    assert not crew.can_begin


def test_those_that_had_finished_take_part_again() -> None:
    crew = running(2)
    crew.finished(0, 1)
    assert not crew.all_finished
    assert not crew.gone(1)
    assert crew.interrupt("rank 1 was killed") == []
    crew.started(1)
    crew.ready(1)
    assert sorted(crew.begin()) == [0, 1]
    for slot in (0, 1):
        crew.finished(slot, 2)
    assert crew.all_finished
    assert crew.gone(1)


def test_ranks_of_a_machine_that_is_given_back_leave_with_the_next_epoch() -> None:
    crew = running(4, least=2)
    crew.unwelcome = {1, 3}
    crew.interrupt("node is given back")
    for slot in range(4):
        crew.ready(slot)
    assert crew.num_ranks == 2
    assert {slot: order["rank"] for slot, order in crew.begin().items()} == {0: 0, 2: 1}
    assert crew.superfluous == [1, 3]


def test_a_run_that_has_lost_its_last_rank_ends() -> None:
    """It waited for ranks that had been lost before and were never replaced."""
    output = Output(io.BytesIO(), io.BytesIO(), 2, None, False)
    launch = ElasticLaunch(2, output, Grace(lambda: 1.0), Elastic(1, 2, replaces=False))
    given = [fd for slot in (0, 1) for fd in launch._streams(slot)]
    for slot in (0, 1):
        launch._said(slot, {"ready": True})
    launch._ended(0, -9)
    assert not launch._verdict.all_ended
    launch._ended(1, -9)
    assert launch._verdict.all_ended
    assert launch._verdict.failed
    for fd in (*given, *launch._shared):
        os.close(fd)


def test_a_number_that_is_wanted_early_counts_and_one_after_the_end_does_not(tmp_path: Path) -> None:
    """Before the first epoch it was dropped; after the last one processes were started that had nothing to do, again
    and again, or waited for one that had left."""
    output = Output(io.BytesIO(), io.BytesIO(), 3, None, False)
    launch = ElasticLaunch(2, output, Grace(lambda: 1.0), Elastic(1, 3, directory=tmp_path))
    forked: list[int] = []
    given: list[int] = []

    def fork(slot: int) -> None:
        forked.append(slot)
        given.extend(launch._streams(slot))

    launch._fork = fork  # type: ignore[method-assign]
    for slot in (0, 1):
        fork(slot)
    want(tmp_path, 3)
    launch._judge(0.0)
    assert forked == [0, 1], "its zygote reads the spec, and would take an order for a part of it"
    launch._heard({"started": [0, 0]})
    launch._judge(0.0)
    assert forked == [0, 1, 2]
    for slot in range(3):
        launch._said(slot, {"ready": True})
    assert len(launch._crew.ranks) == 3
    want(tmp_path, 2)
    launch._judge(0.0)
    for slot in range(3):
        launch._said(slot, {"ready": True})
    launch._ended(2, 0)
    for slot in range(2):
        launch._said(slot, {"finished": 2})
    want(tmp_path, 3)
    launch._judge(0.0)
    assert forked == [0, 1, 2]
    launch._ended(0, 0)
    launch._ended(1, -9)
    assert launch._verdict.all_ended
    assert not launch._verdict.failed
    for fd in (*given, *launch._shared):
        os.close(fd)


def test_at_no_time_are_there_two_epochs() -> None:
    """Random events: whoever runs, runs in the newest epoch, and each epoch has ranks 0..n-1."""
    chance = random.Random(3)
    crew = running(4, least=2)
    epoch_of = dict.fromkeys(range(4), 1)
    for _ in range(2000):
        slot = chance.randrange(4)
        if slot not in crew.states:
            crew.started(slot)
        elif chance.random() < 0.2:
            was_rank = crew.states[slot] is MemberState.RUNNING
            crew.gone(slot)
            if was_rank:
                crew.interrupt("lost")
        elif crew.states[slot] in (MemberState.STARTING, MemberState.LEAVING):
            crew.ready(slot)
        if crew.can_begin:
            orders = crew.begin()
            assert sorted(order["rank"] for order in orders.values()) == list(range(len(orders)))
            epoch_of |= {slot: order["epoch"] for slot, order in orders.items()}
        runs = [slot for slot, state in crew.states.items() if state is MemberState.RUNNING]
        assert {epoch_of[slot] for slot in runs} <= {crew.epoch}
    assert crew.epoch > 20
