"""From gradients to weights: replicas, clipping, gradients that are not finite, loss scales."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from runtime_gloo import Worlds
from runtime_models import WIDTH, Model, build
from runtime_support import OPTIMIZERS, Case, check, differing, pipeline
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.layer import even_partition
from vpipe.runtime.updates.update import LossScale
from vpipe.schedule import catalog

SYNCHRONOUS = [entry.name for entry in catalog.entries() if entry.mode == "bsp"]
mse = nn.functional.mse_loss


def _states(pipe: Pipeline) -> list[dict[str, Tensor]]:
    """Every engine's own parameters."""
    return [
        {name: p.detach().clone() for stage in engine.stages.values() for name, p in stage.weights.parameters.items()}
        for engine in pipe.engines
    ]


def _different_everywhere() -> list[Any]:
    """Factories, each of which draws new weights."""
    return [lambda: nn.Linear(WIDTH, WIDTH) for _ in range(4)]


def test_replicas_start_equal_and_stay_equal() -> None:
    torch.manual_seed(0)
    pipe = Pipeline(
        _different_everywhere(),
        mse,
        schedule="1f1b",
        num_microbatches=2,
        num_ranks=4,
        replicas=2,
        optimizer=OPTIMIZERS["adam"],
    )
    for _ in range(2):
        states = _states(pipe)
        for stage in range(2):
            first, second = (states[rank] for rank in pipe.placement.ranks_of[stage])
            assert not differing(first, second)
        pipe.train_step(torch.randn(8, WIDTH), torch.randn(8, WIDTH))


def weights_of_a_rank() -> dict[str, Tensor]:
    """Factories under gloo: every process draws other numbers."""
    torch.manual_seed(torch.distributed.get_rank())
    pipe = Pipeline(_different_everywhere(), mse, schedule="1f1b", num_microbatches=2, replicas=2)
    state = {name: tensor.detach().clone() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return state


def test_initial_weights_are_broadcast_over_gloo(worlds: Worlds) -> None:
    found = worlds.run(4, weights_of_a_rank)
    assert not differing(found[0], found[2])
    assert not differing(found[1], found[3])
    assert found[0].keys() != found[1].keys()


def test_fast_reduction_is_close() -> None:
    """Two replicas: a sum of two has one order. Three: it may differ in the last bits, and only there."""
    check(Case("1f1b", "plain", 4, 2, replicas=2, more={"exact_reduction": False}))
    model, twin = build("plain", 10), build("plain", 10)
    exact = pipeline(Case("1f1b", "plain", 6, 2, "sgd", replicas=3), model, 6)
    fast = pipeline(Case("1f1b", "plain", 6, 2, "sgd", replicas=3, more={"exact_reduction": False}), twin, 6)
    for step in range(2):
        inputs, targets = model.data(12, step)
        exact.train_step(inputs, targets)
        fast.train_step(inputs, targets)
    for name, tensor in exact.state_dict().items():
        torch.testing.assert_close(fast.state_dict()[name], tensor)


class Unused(nn.Module):
    """One of its weights is used by some units only, the other by none."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.sometimes(x) if x[0, 0] > 0 else x * 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_weights_that_nobody_used_are_left_alone(replicas: int) -> None:
    """AdamW would shrink a weight whose gradient is zero, but not one that has none."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Unused(), Unused(), nn.Linear(WIDTH, WIDTH)]
    before = [layer.never.weight.detach().clone() for layer in layers[1:3]]
    pipe = Pipeline(
        layers,
        mse,
        schedule="1f1b",
        num_microbatches=4,
        num_ranks=2 * replicas,
        replicas=replicas,
        optimizer=OPTIMIZERS["adamw"],
    )
    pipe.train_step(torch.randn(8 * replicas, WIDTH), torch.randn(8 * replicas, WIDTH))
    assert all(torch.equal(layer.never.weight, old) for layer, old in zip(layers[1:3], before, strict=True))


def _poisoned(model: Model, rows: int, step: int, bad: bool) -> tuple[Any, Any]:
    inputs, targets = model.data(rows, step)
    if bad:
        inputs[rows // 2] = float("nan")
    return inputs, targets


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_a_gradient_that_is_not_finite_skips_the_update_everywhere(schedule: str) -> None:
    """Only one stage of the model sees the infinity; all stages skip, and the next step is as if it had not been."""
    model, twin = build("plain", 10, 0.0), build("plain", 10, 0.0)
    case = Case(schedule, "plain", 2, 4)
    pipe, other = pipeline(case, model, 2), pipeline(case, twin, 2)
    rows = 2 * pipe.programs.num_units
    hook = model.layers[0].weight.register_hook(lambda gradient: gradient * float("inf"))
    before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    pipe.train_step(*model.data(rows, 0))
    assert not differing(pipe.state_dict(), before)
    assert {engine.updater.num_skipped for engine in pipe.engines} == {1}
    hook.remove()
    pipe.train_step(*_poisoned(model, rows, 1, bad=True))
    assert not differing(pipe.state_dict(), before)
    pipe.train_step(*model.data(rows, 2))
    other.train_step(*model.data(rows, 2))
    assert not differing(pipe.state_dict(), other.state_dict())


def test_not_finite_without_skipping() -> None:
    model = build("plain", 10, 0.0)
    pipe = pipeline(Case("1f1b", "plain", 2, 4, more={"skip_nonfinite": False}), model, 2)
    pipe.train_step(*_poisoned(model, 8, 0, bad=True))
    assert any(tensor.isnan().any() for tensor in pipe.state_dict().values())


def test_asynchronous_stages_skip_by_themselves() -> None:
    model = build("plain", 10, 0.0)
    pipe = pipeline(Case("pipedream", "plain", 2, 6), model, 2)
    pipe.train_step(*_poisoned(model, 12, 0, bad=True))
    assert not any(tensor.isnan().any() for tensor in pipe.state_dict().values())
    assert {engine.updater.num_skipped for engine in pipe.engines} == {2}, "one at each stage, told to all"


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_static_power_of_two_changes_no_bit(schedule: str) -> None:
    """Scaled up before the backward, down before the update: exact for powers of two."""
    model, twin = build("plain", 10), build("plain", 10)
    plain = pipeline(Case(schedule, "plain", 2, 4, clip_norm=0.5), twin, 2)
    scaled = pipeline(Case(schedule, "plain", 2, 4, clip_norm=0.5, more={"loss_scale": LossScale(1024.0)}), model, 2)
    for step in range(2):
        assert scaled.train_step(*model.data(8, step)) == plain.train_step(*model.data(8, step))
    assert not differing(scaled.state_dict(), plain.state_dict())


def test_a_dynamic_scale_is_agreed_on_by_all_ranks() -> None:
    model = build("plain", 10, 0.0)
    scale = LossScale(2.0**130, dynamic=True, growth_interval=2)
    pipe = pipeline(Case("1f1b", "plain", 3, 4, more={"loss_scale": scale, "skip_nonfinite": False}), model, 3)
    values = []
    for step in range(40):
        pipe.train_step(*model.data(8, step))
        assert {engine.updater.loss_scale for engine in pipe.engines} == {pipe.loss_scale.value}
        values.append(pipe.loss_scale.value)
    assert values[0] == 2.0**129  # the first overflowed
    skipped = pipe.engines[0].updater.num_skipped
    assert 0 < skipped < 40
    assert not any(tensor.isnan().any() for tensor in pipe.state_dict().values())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "pipedream"])
def test_hooks_of_parameters_see_their_gradients(schedule: str) -> None:
    """A mask on a gradient, as people freeze rows of an embedding."""
    model = build("plain", 10, 0.0)
    weight = model.layers[0].weight
    weight.register_hook(lambda gradient: gradient * (torch.arange(WIDTH) < 2).unsqueeze(1))
    before = weight.detach().clone()
    pipe = pipeline(Case(schedule, "plain", 2, 4, "sgd"), model, 2)
    pipe.train_step(*model.data(8, 0))
    assert torch.equal(weight[2:], before[2:])
    assert not torch.equal(weight[:2], before[:2])


def test_clipping_is_by_the_norm_of_all_stages() -> None:
    norms = set()
    for schedule, num_ranks in (("1f1b", 1), ("1f1b", 2), ("zb-v", 2), ("interleaved", 2), ("gpipe", 5)):
        model = build("plain", 10)
        pipe = pipeline(Case(schedule, "plain", num_ranks, 4, clip_norm=0.1), model, num_ranks)
        pipe.train_step(*model.data(8, 0))
        norms |= {engine.updater.last_norm for engine in pipe.engines}
    assert len(norms) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_the_users_optimizer_steps_as_it_does_in_a_plain_loop(fused: bool) -> None:
    """A fused Adam rounds otherwise than a plain one: whoever gives it gets its bits, and nobody else."""

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01, fused=True if fused else None)

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    plain = copy.deepcopy(nn.Sequential(*layers))
    pipe = Pipeline(layers, mse, schedule="1f1b", num_microbatches=4, num_ranks=2, optimizer=adam)
    optimizer = adam(plain.parameters())
    for _ in range(3):
        x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        pipe.train_step(x, y)
        for unit, goal in zip(x.chunk(4), y.chunk(4), strict=True):
            (mse(plain(unit), goal) * 0.25).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert differing(pipe.state_dict(), plain.state_dict()) == []


def test_a_loss_scale_grows_after_an_interval_of_good_steps_and_never_falls_below_one() -> None:
    scale = LossScale(4.0, dynamic=True, growth_interval=3)
    seen = []
    for finite in (True, True, True, True, True, False, True, True, True, False, False, False, False, False):
        scale.update(finite)
        seen.append(scale.value)
    #      grows at the third good step    a bad one halves it, and counting begins anew     the floor
    assert seen == [4.0, 4.0, 8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0]
    still = LossScale(4.0, growth_interval=1)
    still.update(True)
    still.update(False)
    assert still.value == 4.0


def test_a_skipped_update_counts_for_the_learning_rate() -> None:
    """Update n uses rate(n) on every stage, whether update n - 1 was made or skipped."""
    model = build("plain", 10)
    pipe = pipeline(Case("1f1b", "plain", 2, 4, optimizer="sgd"), model, 2)
    pipe.set_learning_rate(lambda update: 0.1 * (update + 1))
    inputs, targets = model.data(8, 0)
    rates = []
    for step in range(3):
        before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        bad = torch.full_like(inputs, torch.nan) if step == 1 else inputs
        pipe.train_step(bad, targets)
        rates.append({group["lr"] for made in pipe.optimizers.values() for group in made.param_groups})
        changed = any(not torch.equal(before[name], tensor) for name, tensor in pipe.state_dict().items())
        assert changed == (step != 1)
    assert [round(rate, 6) for (rate,) in rates] == [0.1, 0.1, 0.3]


@pytest.mark.parametrize(
    ("num_layers", "sizes"),
    [(8, [2, 2, 2, 2]), (9, [2, 3, 2, 2]), (10, [2, 3, 3, 2]), (11, [3, 3, 3, 2]), (7, [2, 2, 2, 1])],
)
def test_surplus_layers_go_to_the_middle(num_layers: int, sizes: list[int]) -> None:
    assert even_partition(num_layers, 4) == sizes
