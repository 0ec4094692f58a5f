"""Evaluation disturbs nothing, accumulation over steps adds up, statistics advance once."""

from __future__ import annotations

import pytest
import torch
from runtime_models import CLASSES, build
from runtime_support import Case, check, differing, pipeline

from vpipe.schedule import catalog

SCHEDULES = [entry.name for entry in catalog.entries()]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluation_before_between_and_after_training(schedule: str) -> None:
    """It changes nothing: gradients and running statistics stay, and the training that follows has the same bits."""
    case = Case(schedule, "batch_norm", 2, 4)
    model, twin = build("batch_norm", 10), build("batch_norm", 10)
    pipe, other = pipeline(case, model, 2), pipeline(case, twin, 2)
    rows = 2 * pipe.programs.num_units
    synchronous = pipe.programs.synchronous
    for step in range(2):
        inputs, targets = model.data(rows, step)
        before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        first = pipe.evaluate(inputs, targets)
        assert pipe.evaluate(inputs, targets) == first
        assert pipe.forward(inputs).shape == (rows, CLASSES)
        assert not differing(pipe.state_dict(), before)
        if synchronous:
            pipe.train_step(inputs, targets, update=False)
            other.train_step(inputs, targets, update=False)
            kept = {name: tensor.clone() for name, tensor in pipe.gradients().items()}
            pipe.evaluate(inputs, targets)
            assert not differing(pipe.gradients(), kept)
        assert pipe.train_step(inputs, targets) == other.train_step(inputs, targets)
        pipe.evaluate(inputs, targets)
    assert not differing(pipe.state_dict(), other.state_dict())


def test_accumulation_over_steps_is_one_big_step() -> None:
    """torch's two steps gave 1.25 times the gradient; here two halves are the whole, to the bit."""
    model, twin = build("plain", 10), build("plain", 10)
    half, whole = Case("zb-h1", "plain", 2, 4), Case("zb-h1", "plain", 2, 8)
    pipe, big = pipeline(half, model, 2), pipeline(whole, twin, 2)
    for step in range(2):
        inputs, targets = model.data(16, step)
        losses = [
            pipe.train_step(inputs[:8], targets[:8], update=False, weight=0.5),
            pipe.train_step(inputs[8:], targets[8:], weight=0.5),
        ]
        assert big.train_step(inputs, targets) == pytest.approx(sum(losses) / 2)
    assert not differing(pipe.state_dict(), big.state_dict())


def test_batch_norm_advances_once_per_forward_in_order() -> None:
    for schedule in ("1f1b", "zb-v", "gpipe"):
        pipe = check(Case(schedule, "batch_norm", 2, 4, recompute=1.0, num_steps=3))
        tracked = [tensor for name, tensor in pipe.state_dict().items() if name.endswith("num_batches_tracked")]
        assert [int(number) for number in tracked] == [12] * 8


def test_random_numbers_of_the_caller_are_not_disturbed() -> None:
    model = build("plain", 6)
    pipe = pipeline(Case("1f1b"), model, 2)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    pipe.train_step(*model.data(8, 0))
    pipe.evaluate(*model.data(8, 0))
    assert torch.equal(torch.rand(3), expected)
