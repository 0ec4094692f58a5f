"""Ranks that update first and agree afterwards compute what plain torch computes, also where an update is taken back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runtime_gloo import Worlds
from runtime_support import check_trace, differing
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.errors import UserError
from vpipe.layer import TiedWeight
from vpipe.runtime.updates.update import LossScale

RANKS, UNITS, BATCHES, ROWS, WIDTH = 3, 4, 6, 2, 5
mse = nn.functional.mse_loss


class Counting(nn.Module):
    """A layer with a buffer that it changes and reads, and a gradient that is not finite in one chosen backward."""

    def __init__(self, bad: int | None) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.num_forwards = 0
        backwards = iter(range(10**6))
        self.linear.weight.register_hook(lambda grad: grad * float("inf") if next(backwards) == bad else grad)

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += self.training
        x = torch.tanh(self.norm(self.linear(x)))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x + self.mean


def layers(bad: tuple[int, int] | None) -> list[Counting]:
    """``bad``: in which layer, and in which of all backwards, the gradient is not finite."""
    torch.manual_seed(0)
    return [Counting(bad[1] if bad is not None and bad[0] == layer else None) for layer in range(2 * RANKS)]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (BATCHES * UNITS * ROWS, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def trained(schedule: str, batches: int, found: list[Counting], clip: float | None, **more: Any) -> Pipeline:
    """Six batches, ``batches`` at a time."""
    pipe = Pipeline(
        found,
        mse,
        schedule=schedule,
        num_ranks=RANKS if more.pop("alone", True) else None,
        num_microbatches=UNITS,
        schedule_options={"post_validation": True, "num_batches": batches},
        optimizer=adam,
        clip_norm=clip,
        **more,
    )
    inputs, targets = data()
    rows = batches * UNITS * ROWS
    for begin in range(0, len(inputs), rows):
        pipe.train_step(inputs[begin : begin + rows], targets[begin : begin + rows])
    return pipe


def by_hand(found: list[Counting], clip: float | None) -> tuple[dict[str, Tensor], int]:
    """Plain torch: microbatch after microbatch, one norm over all, no update where a gradient is not finite."""
    model = nn.Sequential(*found)
    optimizer, skipped = adam(model.parameters()), 0
    inputs, targets = data()
    for batch in range(BATCHES):
        for unit in range(batch * UNITS, (batch + 1) * UNITS):
            rows = slice(unit * ROWS, (unit + 1) * ROWS)
            (mse(model(inputs[rows]), targets[rows]) * (1 / UNITS)).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        else:
            skipped += 1
        optimizer.zero_grad(set_to_none=True)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, skipped


@pytest.mark.rotates(12)
@pytest.mark.parametrize("schedule", ["zb-h2", "zb-v"])
@pytest.mark.parametrize(
    ("bad", "clip"),
    [(None, None), (None, 0.2), ((0, 5), None), ((3, 2), 0.2), ((5, 4 * UNITS + 3), None), ((5, 5 * UNITS), 1e9)],
    ids=["fine", "clipped", "first stage", "clipped too", "last stage", "last batch"],
)
@pytest.mark.parametrize("batches", [1, 3])
def test_equal_to_plain_torch(schedule: str, batches: int, bad: tuple[int, int] | None, clip: float | None) -> None:
    expected, skipped = by_hand(layers(bad), clip)
    found = layers(bad)
    pipe = trained(schedule, batches, found, clip)
    assert not differing(pipe.state_dict(), expected)
    assert pipe.stats.num_skipped == skipped == (bad is not None)
    check_trace(pipe.trace().program())
    # Rank 0 has begun two units of the next batch when the ranks agree; that of the last batch of a program none.
    within = BATCHES - BATCHES // batches
    taken_back = within if clip == 0.2 else bool(bad is not None and bad[1] // UNITS % batches < batches - 1)
    assert found[0].num_forwards == BATCHES * UNITS + taken_back * (RANKS - 1)


def test_a_loss_scale_that_changes_is_read_by_the_units_that_have_begun() -> None:
    """It doubles after two good updates and halves after a bad one; both while the next batch is on its way."""
    states = []
    for schedule, batches in (("zb-h2", 3), ("zb-h2", 1), ("zb-v", 6)):
        scale = LossScale(8.0, dynamic=True, growth_interval=2)
        pipe = trained(schedule, batches, layers((3, 9)), 0.3, loss_scale=scale)
        states.append(pipe.state_dict())
        assert pipe.stats.loss_scale == 16.0
    assert not differing(states[0], states[1])
    assert not differing(states[0], states[2])


def test_the_whole_state_of_the_optimizer_is_taken_back() -> None:
    """Adam's moments and its count, and the learning rate of the update that was not made."""
    rates = []
    for options in ({}, {"post_validation": True, "num_batches": BATCHES}):
        pipe = Pipeline(
            layers((2, 6)), mse, schedule="zb-h2", num_ranks=RANKS, num_microbatches=UNITS, schedule_options=options,
            optimizer=adam, clip_norm=0.3,
        )  # fmt: skip
        pipe.set_learning_rate(lambda update: 0.1 / (1 + update))
        inputs, targets = data()
        rows = len(inputs) if options else UNITS * ROWS
        for begin in range(0, len(inputs), rows):
            pipe.train_step(inputs[begin : begin + rows], targets[begin : begin + rows])
        optimizers = [optimizer for engine in pipe.engines for optimizer in engine.updater.optimizers.values()]
        rates.append(copy.deepcopy([optimizer.state_dict() for optimizer in optimizers]))
    assert rates[0][0]["param_groups"] == rates[1][0]["param_groups"]
    for one, other in zip(*rates, strict=True):
        for parameter, state in one["state"].items():
            assert all(torch.equal(state[name], other["state"][parameter][name]) for name in state)


def trained_rank() -> dict[str, Tensor]:
    pipe = trained("zb-h2", 3, layers((3, 2)), 0.2, alone=False)
    state = {name: tensor.detach().clone() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return state


@pytest.mark.slow
def test_between_processes(worlds: Worlds) -> None:
    expected, _ = by_hand(layers((3, 2)), 0.2)
    for state in worlds.run(RANKS, trained_rank):
        assert not differing(state, {name: expected[name] for name in state})


class Foreign(torch.optim.SGD):
    """An optimizer of the user's own, with a part that nobody can copy."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.part = object()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schedule": "1f1b"}, "1f1b has no option 'post_validation'"),
        ({"replicas": 3}, "post_validation has no replicas yet"),
        ({"executor": "threaded"}, "post_validation needs executor='plain'"),
        ({"optimizer": lambda ps: Foreign(ps, lr=0.1)}, "keeps more than its state"),
        ({"tied": [TiedWeight(((0, "linear.weight"), (1, "linear.weight")))]}, "post_validation cannot have tied"),
        ({"swap": 1.0}, "stands between an update and the agreement on it"),
        ({"schedule_options": {"num_batches": 2}}, "num_batches is 2, but without post_validation"),
        ({"schedule_options": {"post_validation": "yes"}}, "post_validation must be true or false, not 'yes'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_refused_in_a_sentence(change: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {
        "schedule": "zb-h2",
        "num_ranks": RANKS,
        "num_microbatches": UNITS,
        "schedule_options": {"post_validation": True, "num_batches": 2},
        "optimizer": adam,
    }
    with pytest.raises(UserError) as refused:
        Pipeline(layers(None), mse, **(options | change))
    assert words in str(refused.value)


class Halving(torch.optim.SGD):
    """Changes the gradients that it is given."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        super().step()


def test_an_optimizer_that_changes_gradients_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Halving, "__module__", "torch.optim.halving")
    pipe = Pipeline(
        layers(None), mse, schedule="zb-h2", num_ranks=RANKS, num_microbatches=UNITS, clip_norm=0.01,
        schedule_options={"post_validation": True}, optimizer=lambda parameters: Halving(parameters, lr=0.1),
    )  # fmt: skip
    with pytest.raises(UserError, match="Halving changes the gradients themselves"):
        pipe.train_step(*(tensor[: UNITS * ROWS] for tensor in data()))
