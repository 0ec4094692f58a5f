"""The optimizer's update in a prediction: once a batch in synchronous schedules, after every unit in PipeDream's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

import vpipe
from vpipe.layer import even_partition
from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.judge import Candidate, Judge
from vpipe.plan.layout import PlannedLayout
from vpipe.plan.memory import Choice
from vpipe.plan.planner import plan
from vpipe.plan.predict import Machine, Pipe, predict
from vpipe.schedule.action import Kind
from vpipe.schedule.authors.authoring import Entry
from vpipe.schedule.catalog import entries
from vpipe.schedule.program import Program, to_csv

UPDATE = 0.5
LAYER = LayerCost("layer", 1.0, 1.0, 1.0, 0, 0, 8)
PLAIN = Profile((LAYER,) * 4)
PAYING = Profile((replace(LAYER, update=UPDATE),) * 4)
RANKS, MICROBATCHES = 2, 6


def step(profile: Profile, schedule: str) -> float:
    pipe = Pipe.of(schedule, RANKS, MICROBATCHES)
    return predict(profile, PlannedLayout.of_counts(even_partition(4, RANKS)), pipe, Machine.of(RANKS, None)).step_time


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_synchronous_batch_ends_with_one_update(schedule: str) -> None:
    assert step(PAYING, schedule) == pytest.approx(step(PLAIN, schedule) + 2 * UPDATE)


def test_an_asynchronous_pipe_updates_after_every_unit() -> None:
    assert step(PLAIN, "pipedream") == pytest.approx(MICROBATCHES * 2 * 3.0)
    assert step(PAYING, "pipedream") == pytest.approx(MICROBATCHES * 2 * (3.0 + UPDATE))


def test_two_versions_update_once_a_batch() -> None:
    assert step(PAYING, "pipedream-2bw") == pytest.approx(step(PLAIN, "pipedream-2bw") + 2 * UPDATE)


def test_the_search_sees_updates_that_every_unit_pays() -> None:
    """A layer whose update is dear gets fewer neighbours where it is paid after every unit."""
    dear = Profile((replace(LAYER, update=7.5), *[LAYER] * 4))
    once, always = (plan(dear, RANKS, num_microbatches=8, schedule=name).layout for name in ("1f1b", "pipedream"))
    assert once.counts in ((2, 3), (3, 2))
    assert always.counts == (1, 4)


SYNCHRONOUS = [each for each in entries() if not each.asynchronous and not each.two_ways]


def executed(pipe: Pipe, layout: PlannedLayout) -> Program:
    """What the ranks of a pipeline run that is cut, recomputed and swapped as planned."""
    stages = range(layout.num_stages)
    recomputed, swapped = (
        [layer for stage in stages for layer in layout.layers(stage, choice)]
        for choice in (Choice.RECOMPUTE, Choice.SWAP)
    )
    pipeline = vpipe.Pipeline(
        [nn.Linear(2, 2) for _ in range(layout.num_layers)],
        nn.MSELoss(),
        schedule=pipe.entry.name,
        num_ranks=pipe.total_ranks,
        num_microbatches=pipe.num_microbatches,
        stages_per_rank=pipe.stages_per_rank if pipe.entry.any_stages_per_rank else None,
        replicas=pipe.width,
        partition=layout.counts,
        recompute=set(recomputed),
        swap=set(swapped),
    )
    return pipeline.programs.training()


@pytest.mark.parametrize("entry", SYNCHRONOUS, ids=lambda entry: entry.name)
def test_the_program_that_is_predicted_is_the_one_that_runs(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both that of ``predict`` and that of the search's judge: every action of every rank, the agreement too."""
    simulated, judged = [], []
    from vpipe.plan import judge
    from vpipe.plan import predict as predicting

    def kept(program: Program, *rest: object, **options: object) -> object:
        simulated.append(program)
        return simulate(program, *rest, **options)

    def laid_out(program: Program, **options: object) -> object:
        judged.append(program)
        return graph(program, **options)

    simulate, graph = predicting.simulate, judge.ProgramGraph
    monkeypatch.setattr(predicting, "simulate", kept)
    monkeypatch.setattr(judge, "ProgramGraph", laid_out)
    for width, treated in ((1, Choice.KEEP), (2, Choice.KEEP), (1, Choice.RECOMPUTE), (1, Choice.SWAP)):
        simulated.clear()
        judged.clear()
        pipe = Pipe.of(entry.name, 2, 4, replicas=(2, 2) if width == 2 else ())
        counts = even_partition(2 * pipe.num_stages, pipe.num_stages)
        choices = [[treated] * counts[0], *([Choice.KEEP] * count for count in counts[1:])]
        layout = PlannedLayout.of_counts(counts, choices)
        profile = Profile((replace(LAYER, update=UPDATE),) * layout.num_layers, swap_bandwidth=8.0)
        machine = Machine.of(pipe.total_ranks, None)
        found = predict(profile, layout, pipe, machine)
        times = (1.0, *[0.0] * (pipe.num_stages - 1))
        again, swap = (times if treated is each else () for each in (Choice.RECOMPUTE, Choice.SWAP))
        Judge(profile, pipe, machine).steps([Candidate(layout.cuts, again, swap)])
        runs = executed(pipe, layout)
        assert to_csv(simulated[0]) == to_csv(runs)
        assert [*simulated, judged[-1]] == [runs, runs]
        assert Kind.AGREE in runs.flat.kinds
        assert found.step_time > 0


def test_an_update_waits_for_the_last_rank() -> None:
    """zb-h2 ends staggered: where the first stage's update is dear, all ranks wait for it, and the plan says so."""
    dear = Profile((replace(LAYER, update=4.0), *[LAYER] * 3))
    layout = PlannedLayout.of_counts([1] * 4)
    found = predict(dear, layout, Pipe.of("zb-h2", 4, 8), Machine.of(4, None))
    assert found.step_time == 27 + 4
    judged = Judge(dear, Pipe.of("zb-h2", 4, 8), Machine.of(4, None)).steps([Candidate(layout.cuts)])
    assert judged == [27 + 4]
    assert plan(dear, 4, num_microbatches=8, schedule="zb-h2").step_time == 27 + 4
