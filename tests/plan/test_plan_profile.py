"""The profiler: bytes to the byte, times that add up, like layers once, nothing of the user's touched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vpipe.layer import Layer, as_layers
from vpipe.models import emulated
from vpipe.models.emulated import SleepLayer
from vpipe.plan import transfer
from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.profile import Measuring, measure_layers
from vpipe.plan.transfer import empty_pipeline, measure_overhead, measure_swap

ROWS, FLOAT = 3, 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def measuring(repeat: int = 1, loss: Callable[[Any, Any], Tensor] = nn.functional.mse_loss) -> Measuring:
    return Measuring(loss, lambda parameters: torch.optim.Adam(parameters), repeat)


def measured(layers: list[Any], x: Any, y: Any, how: Measuring | None = None) -> tuple[list[LayerCost], int]:
    return measure_layers(as_layers(layers), x, y, how or measuring())


def test_bytes_of_linear_layers_are_those_on_paper() -> None:
    layers = [nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)]
    costs, input_bytes = measured(layers, torch.randn(ROWS, 8), torch.randn(ROWS, 4))
    wide, narrow = ROWS * 16 * FLOAT, ROWS * 4 * FLOAT
    assert input_bytes == ROWS * 8 * FLOAT
    # A linear layer saves its input; the last one's loss saves the output and the target.
    assert [cost.saved_bytes for cost in costs] == [ROWS * 8 * FLOAT, wide, wide + 2 * narrow]
    assert [cost.boundary_bytes for cost in costs] == [wide, wide, 0]
    weights = [(8 + 1) * 16, (16 + 1) * 16, (16 + 1) * 4]
    assert [cost.parameter_bytes for cost in costs] == [count * FLOAT for count in weights]
    # Adam: two moments, and a count of steps for the weight and one for the bias.
    assert [cost.optimizer_bytes for cost in costs] == [(2 * count + 2) * FLOAT for count in weights]


class Decay(nn.Linear):
    """Changes a buffer, and uses it."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return super().forward(x) * self.mean


def test_a_layer_that_reads_what_it_changes_is_measured() -> None:
    """The stage keeps such a buffer by hooks of its own, which cannot be where the count of bytes has hooks."""
    costs, _ = measured([Decay(), nn.Linear(8, 4)], torch.randn(ROWS, 8), torch.randn(ROWS, 4))
    assert costs[0].saved_bytes > 0


def test_a_layer_with_statistics_is_measured() -> None:
    """The stage asks what autograd has saved of buffers; the count of bytes had nothing to show, and the profile failed."""
    costs, _ = measured(
        [nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)), nn.Linear(16, 4)],
        torch.randn(ROWS, 8),
        torch.randn(ROWS, 4),
    )
    kept = (ROWS * 8 + ROWS * 16 + 2 * 16) * FLOAT  # inputs of both, and the batch's mean and deviation
    assert costs[0].saved_bytes == kept


class Add(nn.Module):
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return x + skip


def test_a_cut_carries_everything_that_is_read_later() -> None:
    layers = [
        Layer(nn.Linear(8, 16), reads=("a",), writes=("skip",)),
        Layer(nn.Linear(16, 4), reads=("skip",), writes=("x",)),
        Layer(nn.Linear(4, 16), reads=("x",), writes=("x",)),
        Layer(Add(), reads=("x", "skip")),
        Layer(Add(), reads=("x", "b")),
    ]
    inputs = {"a": torch.randn(ROWS, 8), "b": torch.randn(ROWS, 16)}
    costs, input_bytes = measured(layers, inputs, torch.randn(ROWS, 16))
    eight, four, sixteen = (ROWS * width * FLOAT for width in (8, 4, 16))
    b = sixteen  # an input that only the last layer reads crosses every cut
    assert input_bytes == eight + b
    assert [cost.boundary_bytes for cost in costs] == [sixteen + b, sixteen + four + b, 2 * sixteen + b, sixteen + b, 0]
    assert costs[3].parameter_bytes == costs[3].optimizer_bytes == costs[3].saved_bytes == 0


class Counted:
    """A factory that counts how often it builds something with storage."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self.make, self.built = make, 0

    def __call__(self) -> nn.Module:
        made = self.make()
        self.built += not any(parameter.is_meta for parameter in made.parameters())
        return made


def test_layers_that_are_alike_are_measured_once() -> None:
    same = [Counted(partial(nn.Linear, 16, 16)) for _ in range(5)]
    costs, _ = measured(list(same), torch.randn(ROWS, 16), torch.randn(ROWS, 16))
    # The first reads an input without a gradient, the last has the loss: they are like no other.
    assert [factory.built for factory in same] == [1, 1, 0, 0, 1]
    assert costs[1] == costs[2] == costs[3]


def test_layers_that_look_alike_but_are_set_otherwise_are_measured_each() -> None:
    factories = [Counted(lambda p=p: nn.Sequential(nn.Linear(4, 4), nn.Dropout(p))) for p in (0.1, 0.1, 0.2, 0.1, 0.1)]
    measured(list(factories), torch.randn(ROWS, 4), torch.randn(ROWS, 4))
    assert [factory.built for factory in factories] == [1, 1, 1, 0, 1]


def test_a_cost_key_says_that_layers_are_alike() -> None:
    factories = [Counted(lambda p=p: nn.Sequential(nn.Linear(4, 4), nn.Dropout(p))) for p in (0.1, 0.2, 0.3, 0.4)]
    layers = [Layer(factory, cost_key="block", name=f"block {i}") for i, factory in enumerate(factories)]
    costs, _ = measured(layers, torch.randn(ROWS, 4), torch.randn(ROWS, 4))
    assert [factory.built for factory in factories] == [1, 1, 0, 1]
    assert [cost.name for cost in costs] == [f"block {i}" for i in range(4)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that passes while layers sleep and at no other time, whatever else this machine does."""
    now = 1000.0

    def sleep_until(deadline: float) -> None:
        nonlocal now
        now = max(now, deadline)

    monkeypatch.setattr(emulated, "sleep_until", sleep_until)
    for module in (emulated, transfer):
        monkeypatch.setattr(module, "perf_counter", lambda: now)


@pytest.mark.usefixtures("clock")
def test_times_are_those_that_the_layers_take() -> None:
    """Sleeping layers say what they take, the split backward included."""
    layers = [SleepLayer(0.020, 0.040, 0.010), SleepLayer(0.060, 0.005, 0.030)]
    costs, _ = measured(layers, torch.randn(ROWS, 4), torch.randn(ROWS, 4), measuring(3))
    for cost, layer in zip(costs, layers, strict=True):
        assert cost.forward == pytest.approx(layer.forward_seconds)
        assert cost.input_grad == pytest.approx(layer.input_grad_seconds)
        assert cost.weight_grad == pytest.approx(layer.weight_grad_seconds)
        assert cost.total == pytest.approx(cost.forward + cost.input_grad + cost.weight_grad)


def test_the_clock_is_the_one_on_the_wall() -> None:
    """No layer wakes before it has slept; what comes on top is the machine's."""
    begin = transfer.now()
    SleepLayer(0.005, 0, 0)(torch.ones(1))
    assert transfer.now() - begin >= 0.005


@pytest.mark.usefixtures("clock")
def test_layers_together_cost_what_they_cost_apart() -> None:
    """Additivity: two layers in one are their sum."""
    apart, _ = measured([SleepLayer(0.006, 0.006, 0.006) for _ in range(4)], torch.randn(2, 4), torch.randn(2, 4))
    pairs = [nn.Sequential(SleepLayer(0.006, 0.006, 0.006), SleepLayer(0.006, 0.006, 0.006)) for _ in range(2)]
    together, _ = measured(list(pairs), torch.randn(2, 4), torch.randn(2, 4))
    assert sum(c.total for c in together) == pytest.approx(sum(c.total for c in apart))


def test_the_modules_of_the_user_are_left_as_they_were() -> None:
    layer = nn.Linear(4, 4)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    measured([layer, nn.Linear(4, 4)], torch.randn(ROWS, 4), torch.randn(ROWS, 4))
    assert all(torch.equal(layer.state_dict()[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert type(layer).forward is nn.Linear.forward
    assert "forward" not in vars(layer), "no deferred backward was installed"


def test_the_machine_is_measured() -> None:
    pipeline = empty_pipeline(1, "auto", 60)
    assert 0 <= measure_overhead(pipeline, 2) < float("inf")
    pipeline.close()
    assert 1e7 < measure_swap(1) < 1e12


def test_a_table_folds_layers_that_cost_the_same() -> None:
    block = LayerCost("block 0", 1e-3, 1e-3, 1e-3, 1000, 100)
    other = LayerCost("head", 2e-3, 1e-3, 1e-3, 1000, 100)
    lines = Profile((other, block, block, block, other)).table().splitlines()
    assert len(lines) == 1 + 2 + 1
    assert lines[1].startswith("0, 4    head (and 1 like it)")
    assert lines[2].startswith("1-3     block 0 (and 2 like it)")
