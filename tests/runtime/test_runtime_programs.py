"""Programs of a user's own: orders that no schedule of the catalogue has."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_models import build
from runtime_support import Case, check, pipeline

from vpipe import Pipeline, UserError
from vpipe.layer import balanced, even_partition
from vpipe.schedule import catalog
from vpipe.schedule.action import Action, Kind, parse
from vpipe.schedule.placement import loop
from vpipe.schedule.program import Program, from_csv

schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")


def _program(*rows: str, num_microbatches: int, stages_per_rank: int = 1) -> Program:
    actions = tuple(tuple(map(parse, row.split())) for row in rows)
    return Program(actions, loop(len(rows), stages_per_rank), num_microbatches)


@pytest.mark.parametrize("model", ["batch_norm", "plain", "auxiliary", "convolution"])
def test_input_gradients_in_another_order(model: str) -> None:
    """What cannot be split is complete after I; it still waits for W, whose order is the order of the sum."""
    program = _program("0F0 0F1 0F2 0I2 0I0 0I1 0W0 0W1 0W2 0STEP", num_microbatches=3)
    check(Case(program, model, 1, 3, num_steps=3, clip_norm=0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["batch_norm", "plain"])
def test_an_update_between_input_and_weight_gradient(model: str) -> None:
    """Unit 1's I is done before the update that must not contain it."""
    program = _program("0F0 0F1 0I0 0I1 0W0 0STEP 0F2 0W1 0STEP 0I2 0W2 0STEP", num_microbatches=3)
    pipe = check(Case(program, model, 1, 3, num_steps=3))  # type: ignore[arg-type]
    assert pipe.trace().versions() == {(0, 0): 0, (0, 1): 0, (0, 2): 1}


def test_updates_that_come_early() -> None:
    """A rank of two stages may write the update of one before the backward of the other: the norm is still of all."""
    program = catalog.build("interleaved", 2, 4)
    rows = []
    for row in program.rows:
        late = [action for action in row if action.kind is not Kind.STEP]
        last = max(index for index, action in enumerate(late) if action.stage >= 2)
        rows.append(
            [*late[: last + 1], Action(late[last].stage, Kind.STEP), *late[last + 1 :], Action(row[0].stage, Kind.STEP)]
        )
    early = program.with_rows(rows)
    assert early != program
    check(Case(early, "plain", 2, 4, clip_norm=0.1))  # type: ignore[arg-type]


def test_a_program_that_cannot_run() -> None:
    program = _program("0B0 0F0 0STEP", num_microbatches=1)
    model = build("plain", 4)
    with pytest.raises(UserError, match="is not a valid program"):  # when it is given, not at the first step
        pipeline(Case(program, "plain", 1, 1), model, 1)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="the program is for 1 ranks, but there are 2"):
        pipeline(Case(program, "plain", 2, 1), model, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_microbatches", [1, 2, 9])
def test_another_number_of_microbatches_for_one_step(num_microbatches: int) -> None:
    """The remainder of an epoch: a step of fewer units, on a synchronous and on an asynchronous schedule."""
    for schedule in ("1f1b", "pipedream", "zb-h1"):
        model, twin = build("plain", 10), build("plain", 10)
        pipe = pipeline(Case(schedule, "plain", 2, 4), model, 2)
        other = pipeline(Case(schedule, "plain", 2, num_microbatches), twin, 2)
        inputs, targets = model.data(2 * num_microbatches, 0)
        assert pipe.train_step(inputs, targets, num_microbatches=num_microbatches) == other.train_step(inputs, targets)


def torch_dump(name: str, file: Path, communication: bool = False) -> Path:
    """A schedule of torch.distributed.pipelining, 2 ranks, 4 microbatches, as torch itself writes it."""

    class Stage(schedules._PipelineStageBase):  # type: ignore[misc]
        def __init__(self) -> None:
            self.num_stages, self.group_size, self.group_rank, self.group = 4, 2, 0, None
            self.submod = torch.nn.Identity()

        def _create_grad_recv_info(self, *args: object) -> tuple[()]:
            return ()

        def _prepare_forward_infra(self, n_microbatches: int) -> None: ...

        def _prepare_backward_infra(self, n_microbatches: int) -> None: ...

    schedule = getattr(schedules, name)([Stage(), Stage()], 4)
    if communication:
        schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    schedule._dump_csv(file, format="compute_comms" if communication else "compute_only")
    return file


@pytest.mark.parametrize("communication", [False, True])
@pytest.mark.parametrize("name", ["ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_a_dump_of_torch_trains(name: str, communication: bool, tmp_path: Path) -> None:
    """It has no updates: each stage gets its one at the end. LoopedBFS adds its gradients in decreasing order."""
    file = torch_dump(name, tmp_path / "dump.csv", communication)
    assert "STEP" not in file.read_text()
    pipe = check(Case(str(file), "batch_norm", 2, 4, num_layers=8, clip_norm=0.5))
    assert pipe.num_updates == 2
    assert pipe.num_microbatches == 4


def test_the_order_of_the_sum_is_the_programs() -> None:
    """Increasing and decreasing order train two models that differ in last bits, each equal to its own replay."""
    forwards = "0F0 0F1 0F2 0F3 "
    up = _program(forwards + "0B0 0B1 0B2 0B3", num_microbatches=4)
    down = _program(forwards + "0B3 0B2 0B1 0B0", num_microbatches=4)
    states = [
        check(Case(program, "plain", 1, 4, optimizer="sgd", num_steps=3)).state_dict()  # type: ignore[arg-type]
        for program in (up, down)
    ]
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_stages_with_orders_of_their_own() -> None:
    """Forwards, too: buffers advance as each stage takes its units."""
    rows = ("0F2 0F0 0F1 0B1 0B2 0B0", "1F0 1F2 1F1 1B1 1B2 1B0")
    check(Case(_program(*rows, num_microbatches=3), "batch_norm", 2, 3, num_steps=3))  # type: ignore[arg-type]
    split = "0F0 0F1 0F2 0I2 0I1 0I0 0W2 0W0 0W1"
    check(Case(_program(split, num_microbatches=3), "convolution", 1, 3, num_steps=3))  # type: ignore[arg-type]


def test_numbers_of_a_program() -> None:
    program = _program("0F0 0F1 0B0 0B1", num_microbatches=2)
    model = build("plain", 4)
    given = {"num_ranks": 1, "optimizer": torch.optim.SGD}
    assert Pipeline(model.layers, model.loss, schedule=program, **given).num_microbatches == 2  # type: ignore[arg-type]
    for wrong, words in (
        ({"num_microbatches": 3}, "the program is for 2 microbatches, but there are 3"),
        ({"stages_per_rank": 2}, "the program has 1 stage per rank, not 2"),
        ({"schedule_options": {"depths": [1]}}, "the program has no option 'depths'"),
    ):
        with pytest.raises(UserError, match=words):
            Pipeline(model.layers, model.loss, schedule=program, **given, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [("0F0 1F1 0B0 1B1", "1F0 0F1 1B0 0B1"), ("0F0 1F1 0B0 1B1 0STEP 1STEP", "1F0 0F1 1B0 0B1 1STEP 0STEP")])  # fmt: skip
def test_two_directions_as_users_write_them(rows: tuple[str, str]) -> None:
    program = from_csv("\n".join(row.replace(" ", ",") for row in rows))
    check(Case(program, "plain", 2, 2, num_steps=3, clip_norm=0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_layers", "num_stages"), [(1, 1), (7, 3), (8, 3), (9, 4), (12, 5), (10, 10)])
def test_the_even_partition_keeps_the_rule_of_the_balanced_one(num_layers: int, num_stages: int) -> None:
    """The largest part as small as possible, then the most even: a formula where all layers count alike."""
    even, balanced_ = even_partition(num_layers, num_stages), balanced([1.0] * num_layers, num_stages)
    assert sorted(even) == sorted(balanced_)
    assert sum(even) == num_layers
    best = min(
        (max(sizes), sum(size**2 for size in sizes))
        for cuts in combinations(range(1, num_layers), num_stages - 1)
        for sizes in [[b - a for a, b in pairwise((0, *cuts, num_layers))]]
    )
    assert (max(even), sum(size**2 for size in even)) == best
