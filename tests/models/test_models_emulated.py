"""Sleeping layers: they take the time they say, and compute gradients that can be checked."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, process_time

import pytest
import torch
from models_reference import loss_and_gradients
from torch import Tensor

from vpipe.errors import UserError
from vpipe.models.emulated import SleepLayer, sleep_until
from vpipe.models.model import build


@pytest.fixture(autouse=True, scope="module")
def _first_backward_loads_the_engine() -> None:
    SleepLayer(0, 0, 0)(torch.ones(1)).sum().backward()


def seconds(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def test_sleep_is_never_short_and_leaves_the_core_free() -> None:
    """How accurate is the business of a benchmark (benchmarks/emulated): a busy machine may always be late."""
    cpu = process_time()
    assert all(seconds(lambda: sleep_until(perf_counter() + 0.005)) >= 0.005 for _ in range(40))
    assert process_time() - cpu < 0.5 * 40 * 0.005


def test_forward_and_backward_take_their_time() -> None:
    layer = SleepLayer(0.010, 0.020, 0.030)
    x = torch.ones(2, 3, requires_grad=True)
    outputs: list[Tensor] = []
    assert seconds(lambda: outputs.append(layer(x))) >= 0.010
    assert seconds(lambda: outputs[0].sum().backward()) >= 0.050


def test_deferred_backward_leaves_the_weight_gradient_for_later() -> None:
    layer = SleepLayer(0.0, 0.010, 0.030)
    layer.weight.data.fill_(3.0)
    x = torch.full((2, 3), 2.0, requires_grad=True)
    later: list[Callable[[], tuple[Tensor | None, ...]]] = []
    y = layer(x)
    y.grad_fn.defer = later.append
    assert seconds(lambda: y.sum().backward()) >= 0.010
    assert torch.equal(x.grad, torch.full((2, 3), 3.0))
    assert layer.weight.grad is None
    assert seconds(later[0]) >= 0.030
    assert later[0]()[1].item() == 12.0


def test_deferred_equals_the_full_backward_to_the_bit() -> None:
    gradients = []
    for deferred in (False, True):
        layer, later = SleepLayer(0, 0, 0), []
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = layer(x)
        if deferred:
            y.grad_fn.defer = later.append
        y.square().mean().backward()
        gradients.append((x.grad, later[0]()[1] if deferred else layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_gradients_are_those_of_a_product() -> None:
    model = build("emulated", {"num_layers": 3, "forward": 0, "input_grad": 0, "weight_grad": 0})
    x, targets = torch.randn(4, 16), torch.randn(4, 16)
    modules = model.build()
    loss, gradients = loss_and_gradients(model, modules, x, targets)
    weights = torch.ones(3, requires_grad=True)
    expected = (x * weights.prod() - targets).square().mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(torch.cat(list(gradients.values())), weights.grad)
    assert model.count(targets) == 64
    assert model.num_parameters == 3


def test_no_gradient_no_backward() -> None:
    with torch.no_grad():
        assert not SleepLayer(0, 0, 0)(torch.ones(2)).requires_grad


def test_tokens_are_taken_as_numbers() -> None:
    assert SleepLayer(0, 0, 0)(torch.tensor([[1, 2]])).dtype == torch.float32


def test_times_per_layer() -> None:
    model = build("emulated", {"num_layers": 2, "forward": [0.1, 0.2]})
    assert [module.forward_seconds for module in model.build()] == [0.1, 0.2]
    with pytest.raises(UserError, match="lists 2 times for 3 layers"):
        build("emulated", {"num_layers": 3, "forward": [0.1, 0.2]})
    with pytest.raises(UserError, match="at least 0"):
        build("emulated", {"forward": -1.0}).build()
