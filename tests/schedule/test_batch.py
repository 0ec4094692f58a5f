"""Many costs through one program: the same numbers as the simulator, to the bit."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vpipe.schedule.authors.authoring import Entry
from vpipe.schedule.batch import ProgramGraph
from vpipe.schedule.catalog import entries
from vpipe.schedule.lower import lower
from vpipe.schedule.simulate import simulate
from vpipe.schedule.timeline import Costs, StageCosts, price_tables


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
