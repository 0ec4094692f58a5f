"""Units weigh what the loss counts: batches with labels that do not count, against torch's loss of the whole batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vpipe
from vpipe.errors import UserError
from vpipe.models.losses import TokenLoss
from vpipe.runtime import objective
from vpipe.runtime.job import Job

CLASSES = 11
CLASS_WEIGHTS = torch.linspace(0.1, 2.0, CLASSES)


class Own(nn.Module):
    """A loss that says what it counts."""

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        kept = targets != -100
        return F.cross_entropy(output[kept], targets[kept], reduction="sum") / kept.sum().clamp(min=1)

    def count(self, targets: Tensor) -> int:
        return int((targets != -100).sum())


def flat(output: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), **options)


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "flat": flat,
    "view": lambda output, targets: F.cross_entropy(output.view(-1, output.size(-1)), targets.view(-1)),
    "shifted": lambda output, targets: flat(output[:, :-1].contiguous(), targets[:, 1:].contiguous()),
    "padded": lambda output, targets: flat(output.float(), F.pad(targets, (0, 1), value=-100)[:, 1:]),
    "another label": lambda output, targets: flat(output, targets.clamp(min=0), ignore_index=3),
    "class weights": lambda output, targets: flat(output, targets, weight=CLASS_WEIGHTS),
    "smoothed": lambda output, targets: flat(output, targets, label_smoothing=0.1),
    "sum": lambda output, targets: flat(output, targets, reduction="sum"),
    "nll": lambda output, targets: 0.5 * F.nll_loss(output.flatten(0, 1).log_softmax(-1), targets.flatten()),
    "module": lambda output, targets: nn.CrossEntropyLoss()(output.transpose(1, 2), targets),
    "a part for all": lambda output, targets: flat(output, targets) + 0.1 * flat(output, targets, label_smoothing=0.2),
    "own": Own(),
    "ours": TokenLoss(),
    "squares": lambda output, targets: F.mse_loss(output.mean(-1), targets.float()),
    "summed squares": lambda output, targets: F.mse_loss(output.mean(-1), targets.float(), reduction="sum"),
}


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Embedding(CLASSES, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)]


def batch(rows: int, seed: int, masked: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randint(0, CLASSES, (2, rows, 5), generator=generator).unbind()
    targets = targets.where(torch.rand(targets.shape, generator=generator) >= masked, -100)
    targets[: rows // 3] = -100  # whole units without a label
    targets[-1, -1] = 4
    return inputs, targets


def assert_whole(loss: Callable[[Any, Any], Tensor], inputs: Tensor, targets: Tensor, **options: Any) -> None:
    """A step of a pipeline has the loss and the gradients of torch's loss over the batch; evaluation too."""
    model = nn.Sequential(*layers())
    expected = loss(model(inputs), targets)
    expected.backward()
    pipe = vpipe.Pipeline(layers(), loss, optimizer=lambda ps: torch.optim.SGD(ps, lr=1.0), **options)
    assert pipe.evaluate(inputs, targets) == pytest.approx(expected.item(), rel=1e-6)
    told = pipe.train_step(inputs, targets)
    assert told == pytest.approx(expected.item(), rel=1e-6)
    ours = pipe.parameters()
    for name, theirs in model.named_parameters():
        assert theirs.grad is not None
        gradient = theirs.detach() - ours[name].detach()
        torch.testing.assert_close(gradient, theirs.grad, rtol=1e-4, atol=1e-6 * (1 + float(theirs.grad.norm())))
    pipe.close()


@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
@pytest.mark.parametrize("name", LOSSES)
def test_units_weigh_what_the_loss_counts(name: str, num_microbatches: int) -> None:
    inputs, targets = batch(7, num_microbatches, 0.5)
    assert_whole(LOSSES[name], inputs, targets, num_ranks=2, num_microbatches=num_microbatches)


def test_random_masks_counts_replicas_and_schedules() -> None:
    draw = random.Random(7)
    for seed in range(40):
        num_microbatches, replicas = draw.randint(1, 8), draw.choice([1, 1, 2, 3])
        schedule = draw.choice(["gpipe", "1f1b", "zb-h1", "interleaved"]) if replicas == 1 else "1f1b"
        num_microbatches = -(-num_microbatches // replicas) * replicas if schedule != "interleaved" else 4
        rows = replicas * draw.randint(num_microbatches, 16)
        inputs, targets = batch(rows, seed, draw.random())
        assert_whole(
            LOSSES[draw.choice([*LOSSES])],
            inputs,
            targets,
            num_ranks=2 * replicas,
            replicas=replicas,
            num_microbatches=num_microbatches,
            schedule=schedule,
        )


def test_a_check_knows_the_same_shares() -> None:
    inputs, targets = batch(8, 1, 0.5)
    pipe = vpipe.Pipeline(layers(), flat, num_ranks=2, num_microbatches=4)
    assert "equal" in pipe.check(inputs, targets)
    pipe.close()


HIDDEN: dict[str, tuple[Callable[[Any, Any], Tensor], str]] = {
    "own mean": (lambda o, t: flat(o, t, reduction="sum") / (t != -100).sum(), "hides what it counts"),
    "none": (lambda o, t: flat(o, t, reduction="none").mean(), "hides what it counts"),
    "by hand": (lambda o, t: -o.log_softmax(-1)[..., 0][t != -100].mean(), "hides what it counts"),
    "two counts": (lambda o, t: flat(o, t) + F.mse_loss(o.mean(-1), t.float()), "different counts"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_loss_that_hides_what_it_counts_is_refused_and_can_be_told(name: str) -> None:
    loss, words = HIDDEN[name]
    inputs, targets = batch(8, 2, 0.5)
    pipe = vpipe.Pipeline(layers(), loss, num_ranks=2, num_microbatches=4)
    with pytest.raises(UserError, match=words):
        pipe.train_step(inputs, targets, update=False)
    pipe.close()
    if name == "own mean":
        targets = targets.where(targets != -100, 1)
        targets[::2, 0] = -100
        assert_whole(loss, inputs, targets, num_ranks=2, num_microbatches=4, count=lambda t: (t != -100).sum())


def test_labels_that_all_count_change_no_bit() -> None:
    inputs, targets = batch(8, 2, 0.0)
    found = []
    for count in (None, lambda labels: labels.shape[0]):
        pipe = vpipe.Pipeline(layers(), flat, num_ranks=2, num_microbatches=4, count=count)
        found.append([pipe.train_step(inputs, targets.clamp(min=0), update=False), *pipe.gradients().values()])
        pipe.close()
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*found, strict=True))


def test_a_first_stage_without_the_targets_is_told() -> None:
    job = Job(0, 0, lambda unit: {}, lambda unit: None, lambda unit: 0.5, None, counted=[0.25, 0.75])
    job.check_share(1, 0.75)
    with pytest.raises(UserError, match=r"microbatch 0 a share of 0.5 by rows, but .* it is 0.25"):
        job.check_share(0, 0.5)


def test_the_labels_of_a_step_are_counted_not_those_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: the counts of the first step for all."""
    pipe = vpipe.Pipeline(layers(), flat, num_ranks=2, num_microbatches=4)
    model = nn.Sequential(*layers())
    for seed in range(3):
        inputs, targets = batch(8, seed, 0.5)
        expected = flat(model(inputs), targets).item()
        assert pipe.train_step(inputs, targets, update=False) == pytest.approx(expected, rel=1e-6)
    pipe.close()
    monkeypatch.setattr(objective.LossCall, "count", lambda call, labels: 1.0)
    pipe = vpipe.Pipeline(layers(), flat, num_ranks=2, num_microbatches=4)
    assert pipe.train_step(inputs, targets, update=False) != pytest.approx(expected, rel=1e-6)
    pipe.close()
