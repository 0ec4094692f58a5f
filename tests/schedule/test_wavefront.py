"""All lanes at once: the same times as one lane after the other, to the bit."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vpipe.schedule import timeline, wavefront
from vpipe.schedule.authors.authoring import Entry
from vpipe.schedule.catalog import build, entries
from vpipe.schedule.flat import Lanes, find_transfers
from vpipe.schedule.lower import lower
from vpipe.schedule.program import Program, from_csv
from vpipe.schedule.timeline import Costs, StageCosts
from vpipe.schedule.wavefront import EventTimes


def both(program: Program, costs: Costs, rendezvous: bool = True) -> tuple[EventTimes | None, EventTimes]:
    """What the wavefront finds, and what the loop over single lanes does."""
    flat, transfers = program.flat, find_transfers(program.flat)
    given = timeline._durations(flat, transfers, costs, blocking_sends=False)
    lanes = Lanes(flat, transfers, rendezvous, blocking_sends=False)
    found = None if lanes.extra else wavefront.loop(lanes, *given)
    return found, timeline._loop(lanes, *(each.tolist() for each in given))


def random_costs(dice: random.Random, num_stages: int) -> Costs:
    def stage() -> StageCosts:
        return StageCosts(*(dice.random() for _ in range(3)), transfer=dice.choice([0.0, dice.random()]))

    return Costs(tuple(stage() for _ in range(num_stages)), dice.random() / 3, dice.random() / 10)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "WIDE", 1)
    monkeypatch.setattr(wavefront, "NARROW", 0)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_schedule(entry: Entry) -> None:
    dice = random.Random(entry.name)
    for p, m in ((2, 6), (4, 3), (4, 9)):
        program = lower(entry.build(p, m))
        for rendezvous in (True, False):
            found, expected = both(program, random_costs(dice, program.num_stages), rendezvous)
            if found is None:
                assert program.placement.has_replicas, "only who waits for several things is left to the other loop"
                continue
            assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
            assert (found[1] >= 0).any()


@pytest.mark.usefixtures("always")
def test_a_program_that_hangs_stops_at_the_same_actions() -> None:
    hangs = from_csv("0RECV_B0,0B0,0F0,0SEND_F0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    found, expected = both(hangs, Costs((StageCosts(1, 1, 1), StageCosts(1, 1, 1))))
    assert found is not None
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert list(map(str, map(hangs.flat.action, timeline.run(hangs).stuck))) == ["0B0", "1F0"]


def test_what_is_narrow_goes_lane_by_lane() -> None:
    dice = random.Random(3)
    wide, narrow = lower(build("1f1b", 130, 96)), lower(build("naive", 130, 64))
    for program, expected in ((wide, True), (narrow, False)):
        found, lanes = both(program, random_costs(dice, 130))
        assert (found is not None) == expected
        assert found is None or all(np.array_equal(a, b) for a, b in zip(found, lanes, strict=True))


@pytest.mark.usefixtures("always")
def test_the_comparison_sees_one_other_duration() -> None:
    program = lower(build("1f1b", 4, 8))
    costs = random_costs(random.Random(5), 4)
    slower = Costs((*costs.stages[:3], StageCosts(9, 9, 9)), costs.latency, costs.overhead)
    (found, _), (_, expected) = both(program, costs), both(program, slower)
    assert found is not None
    assert not np.array_equal(found[1], expected[1])
