"""The clock, against ranks that are played one action after the other; many costs at once; what never happens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vpipe.schedule.action import Kind
from vpipe.schedule.authors.authoring import Entry
from vpipe.schedule.catalog import entries
from vpipe.schedule.flat import find_transfers
from vpipe.schedule.graph import ProgramGraph
from vpipe.schedule.lower import lower
from vpipe.schedule.program import Program, from_csv
from vpipe.schedule.semantics import LANE, Lane, rounds
from vpipe.schedule.simulate import simulate
from vpipe.schedule.timeline import Costs, StageCosts, price_tables, run


def random_costs(rng: random.Random, num_stages: int) -> Costs:
    def stage() -> StageCosts:
        times = [rng.random() for _ in range(7)]
        other = [rng.choice([None, rng.random()]) for _ in range(3)]
        recompute, swap, reduce, step = times[3:]
        return StageCosts(
            *times[:3],
            recompute=recompute,
            swap=swap,
            reduce=reduce,
            step=step,
            transfer=rng.random() / 2,
            transfer_back=other[0],
            latency=other[1],
            latency_back=other[2],
        )

    return Costs(tuple(stage() for _ in range(num_stages)), rng.random() / 3, rng.random() / 10)


def played(program: Program, costs: Costs) -> list[float]:
    """When each action ends: everything is asked what it waits for, again and again, until nothing changes."""
    flat, transfers = program.flat, find_transfers(program.flat)
    price, hop, lag = price_tables(costs)
    lane = [LANE[flat.action(number).kind] for number in range(len(flat))]
    end, arrived, changed = [0.0] * len(flat), [0.0] * len(transfers), True
    meets = {number: places for places in _meetings(program) for number in places}
    takes = {Kind.RECV_F: (Kind.F,), Kind.RECV_B: (Kind.B, Kind.I)}

    def before(number: int, wanted: Lane = Lane.COMPUTE) -> float:
        row = range(int(flat.row_start[flat.rank[number]]), number)
        return next((end[other] for other in reversed(row) if lane[other] is wanted), 0.0)

    while changed:
        was, free = [*end, *arrived], dict[int, float]()
        for number, (send, receive, link) in enumerate(
            zip(transfers.send, transfers.receive, transfers.link, strict=True)
        ):
            way, stage = int(flat.action(send).kind is Kind.SEND_B), flat.stage[send]
            free[link] = max(before(send), before(receive), free.get(link, 0.0)) + hop[way, stage]
            arrived[number] = free[link] + lag[way, stage]
        for number in range(len(flat)):
            stage, kind, microbatch = flat.action(number)
            if lane[number] is Lane.LINK:
                continue
            ready = [before(number), before(number, lane[number])]
            for message, receive in enumerate(transfers.receive):
                taken = flat.action(receive)
                if (taken.stage, taken.microbatch) == (stage, microbatch) and kind in takes[taken.kind]:
                    ready.append(arrived[message])
            if kind in (Kind.B, Kind.I, Kind.R):
                fetch = flat.find(Kind.IN, flat.stage[number : number + 1], flat.microbatch[number : number + 1])[0]
                ready.append(end[fetch] if fetch >= 0 else 0.0)
            ready += [before(member) for member in meets.get(number, ())]
            end[number] = max(ready) + price[flat.kind[number], stage]
        changed = was != [*end, *arrived]
    return end


def _meetings(program: Program) -> list[list[int]]:
    start = program.flat.row_start
    return [[int(start[rank]) + index for rank, index in places.items()] for places in rounds(program).values()]


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_schedule_takes_as_long_as_ranks_that_are_played(entry: Entry) -> None:
    rng = random.Random(entry.name)
    program = entry.build(2, 3 if not entry.two_ways else 2)
    again, swapped = ([s for s in range(program.num_stages) if rng.random() < 0.5] for _ in range(2))
    program = lower(program, recompute_stages=again, swap_stages=swapped, agrees=not entry.asynchronous)
    costs = random_costs(rng, program.num_stages)
    line = run(program, costs)
    lanes = [event for lane in line.lanes for event in lane]
    expected = played(program, costs)
    assert [line.end[event] for event in lanes] == [expected[event] for event in lanes]


def test_a_program_that_hangs_stops_where_each_lane_waits() -> None:
    hangs = from_csv("0RECV_B0,0B0,0F0,0SEND_F0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert list(map(str, map(hangs.flat.action, run(hangs).stuck))) == ["0B0", "1F0"]
    assert ProgramGraph(hangs).deadlocks


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_schedule_takes_what_the_simulator_says(entry: Entry) -> None:
    rng = random.Random(entry.name)
    for num_ranks, num_microbatches in ((2, 2), (4, 3)) if entry.two_ways else ((1, 2), (2, 3), (3, 4), (4, 9)):
        program = entry.build(num_ranks, num_microbatches)
        stages = range(program.num_stages)
        again, swapped = ([s for s in stages if rng.random() < 0.5] for _ in range(2))
        agrees = not entry.asynchronous
        program = lower(program, recompute_stages=again, swap_stages=swapped, agrees=agrees)
        batch = ProgramGraph(program, blocking=entry.blocking)
        given = [random_costs(rng, len(stages)) for _ in range(3)]
        for costs in given:
            price, hop, lag = price_tables(costs)
            table = batch.table(price[:, :, None], hop[:, :, None], lag)
            wanted = simulate(program, costs, blocking=entry.blocking).makespan
            assert batch.makespans(table, lag)[0] == wanted
            assert batch.path(table, lag).weights(table)[0] == pytest.approx(wanted)


def test_columns_do_not_mix_and_a_path_of_one_bounds_the_others() -> None:
    rng = random.Random(1)
    entry = next(entry for entry in entries() if entry.name == "zb-h1")
    batch = ProgramGraph(lower(entry.build(4, 8)))
    tables = [price_tables(random_costs(rng, 4)) for _ in range(20)]
    lag = tables[0][2]
    parts = [batch.table(price[:, :, None], hop[:, :, None], lag) for price, hop, _ in tables]
    together = batch.makespans(np.concatenate(parts, axis=1), lag)
    assert together.tolist() == [batch.makespans(part, lag)[0] for part in parts]
    path = batch.path(parts[0], lag)
    weights = path.weights(np.concatenate(parts, axis=1))
    assert weights[0] == pytest.approx(together[0])
    assert (weights <= together * (1 + 1e-12)).all()
