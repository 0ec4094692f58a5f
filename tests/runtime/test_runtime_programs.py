"""Programs of a user's own: orders that no schedule of the catalogue has."""

from __future__ import annotations

import pytest
from runtime_models import build
from runtime_support import Case, check, pipeline

from vpipe import UserError
from vpipe.schedule import catalog
from vpipe.schedule.action import Action, Kind, parse
from vpipe.schedule.placement import loop
from vpipe.schedule.program import Program


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
    with pytest.raises(UserError, match="is not a valid program"):
        pipeline(Case(program, "plain", 1, 1), model, 1).train_step(*model.data(2, 0))  # type: ignore[arg-type]
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
