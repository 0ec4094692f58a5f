"""Who trains with whom after a loss: the launcher's decisions, without processes."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vpipe.launch.epochs import Crew, Elastic, MemberState
from vpipe.launch.launcher import Launcher
from vpipe.launch.local_place import LocalPlace
from vpipe.launch.output import Output
from vpipe.rundir.roster import want


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


class Nowhere(LocalPlace):
    """A place that writes down what it should do."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__(launcher.events, launcher, {}, leads=True)
        self.forked: list[int] = []
        self.told: list[tuple[int, dict[str, Any]]] = []

    def fork(self, slot: int, variables: Mapping[str, str] | None = None) -> None:
        self.forked.append(slot)

    def tell(self, slot: int, order: dict[str, Any]) -> None:
        self.told.append((slot, order))


def launched(num_ranks: int, elastic: Elastic) -> tuple[Launcher, Nowhere]:
    """A launcher whose ranks are starting."""
    launcher = Launcher(num_ranks, Output(io.BytesIO(), io.BytesIO(), elastic.most, None, False), 1.0, elastic)
    launcher.place = place = Nowhere(launcher)
    for slot in range(num_ranks):
        launcher._fork(slot)
    return launcher, place


def test_a_run_that_has_lost_its_last_rank_ends() -> None:
    """It waited for ranks that had been lost before and were never replaced."""
    launcher, _ = launched(2, Elastic(1, 2, replaces=False))
    for slot in (0, 1):
        launcher.said(slot, {"ready": True})
    launcher.ended(0, -9)
    assert not launcher._verdict.all_ended
    launcher.ended(1, -9)
    assert launcher._verdict.all_ended
    assert launcher._verdict.failed


@pytest.mark.parametrize(
    ("elastic", "forked"),
    [
        (Elastic(2, 3), []),  # fewer go on
        (Elastic(3, 4), [3]),  # another slot takes its part
        (Elastic(3, 3), [2]),  # neither can be: it is tried again
        (Elastic(2, 3, rests=False), [2]),  # with fewer stages other weight versions would be read
    ],
)
def test_a_slot_that_is_lost_again_and_again_rests(elastic: Elastic, forked: list[int]) -> None:
    launcher, place = launched(3, elastic)
    for loss in range(3):
        for slot in sorted(launcher._members):
            launcher.said(slot, {"ready": True})
        launcher.said(0, {"stepped": launcher._crew.epoch})
        launcher.ended(2, -9)
        orders = [order for _, order in place.told if "rank" in order]
        assert {order["losses"] for order in orders if order["epoch"] == loss + 1} == {loss}
    assert place.forked == [0, 1, 2, 2, 2, *forked]
    assert not launcher._verdict.failed
    if elastic == Elastic(2, 3):
        assert launcher._crew.wanted == 2
        launcher._resize(3)
        assert place.forked == [0, 1, 2, 2, 2, 2], "it is tried again where that is asked for"


def test_a_link_that_is_cut_for_ever_ends_the_run_in_a_sentence() -> None:
    """All ranks live and lost each other again and again: the run tried for ever."""
    launcher, _ = launched(2, Elastic(2, 2))
    for epoch in range(1, 6):
        assert not launcher._broken
        for slot in (0, 1):
            launcher.said(slot, {"lost": epoch - 1, "sentence": "rank 0 cannot reach rank 1"})
            launcher.said(slot, {"ready": True})
    launcher.said(0, {"lost": 5, "sentence": "rank 0 cannot reach rank 1"})
    assert launcher._broken == "5 times in a row no step was done: rank 0 cannot reach rank 1"


def test_processes_that_come_and_go_leave_no_descriptor_behind() -> None:
    """A run of a thousand losses died of one a loss."""
    launcher, _ = launched(1, Elastic(1, 1))
    place = LocalPlace(launcher.events, launcher, {}, leads=True)
    counts = []
    for _ in range(3):
        for fd in place._open(0):
            os.close(fd)
        place._heard({"ended": 0, "status": -9})
        counts.append(len(os.listdir("/proc/self/fd")))
    assert len(set(counts)) == 1


def test_a_number_that_is_wanted_early_counts_and_one_after_the_end_does_not(tmp_path: Path) -> None:
    """Before the first epoch it was dropped; after the last one processes were started that had nothing to do, again
    and again, or waited for one that had left."""
    launcher, place = launched(2, Elastic(1, 3, directory=tmp_path))
    want(tmp_path, 3)
    launcher._heed_wishes()
    assert place.forked == [0, 1, 2]
    for slot in range(3):
        launcher.said(slot, {"ready": True})
    assert len(launcher._crew.ranks) == 3
    want(tmp_path, 2)
    launcher._heed_wishes()
    for slot in range(3):
        launcher.said(slot, {"ready": True})
    launcher.ended(2, 0)
    for slot in range(2):
        launcher.said(slot, {"finished": 2})
    want(tmp_path, 3)
    launcher._heed_wishes()
    assert place.forked == [0, 1, 2]
    launcher.ended(0, 0)
    launcher.ended(1, -9)
    assert launcher._verdict.all_ended
    assert not launcher._verdict.failed


def test_orders_wait_until_the_zygote_takes_them() -> None:
    """It reads its spec first, and took an order for a part of it."""
    launcher, _ = launched(1, Elastic(1, 1))
    place = LocalPlace(launcher.events, launcher, {}, leads=True)
    place._control, zygote = socket.socketpair()
    place.fork(0)
    place.signal(signal.SIGUSR1)
    place._heard({"ready": True})
    orders = [json.loads(line) for line in zygote.recv(4096).splitlines()]
    orders += [json.loads(line) for line in zygote.recv(4096).splitlines()] if len(orders) < 2 else []
    assert [("fork" in order, order.get("signal")) for order in orders] == [(True, None), (False, signal.SIGUSR1)]
    zygote.close()
    place._control.close()
    place.close()


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
