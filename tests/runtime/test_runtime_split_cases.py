"""What users' layers have shown about the split: each case against plain torch, under every schedule that splits.

All of these were wrong, or a crash, when the split patched modules and tapped their outputs.
"""

from __future__ import annotations

import io
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from random_layers import LENGTH, WIDTH
from test_runtime_split_random import SCHEDULES, differences
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from vpipe import Pipeline, UserError
from vpipe.runtime.split import deferred, promise
from vpipe.runtime.split.deferred import WeightQueue
from vpipe.runtime.split.structure import Structure


class Block(nn.Module):
    """A Linear and what becomes of its output."""

    def __init__(self, after: Callable[[Any, Tensor, Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, **options)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, x, self.linear(x))


def _add(self: Any, x: Tensor, y: Tensor) -> Tensor:
    y += x
    return y


def _flat(self: Any, x: Tensor, y: Tensor) -> Tensor:
    y = self.linear(x.reshape(-1, WIDTH))
    y += x.reshape(-1, WIDTH)
    return y.view(x.shape)


def _inner_gradient(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = x.detach().requires_grad_()
    return y + 0.1 * torch.autograd.grad(self.linear(z).pow(2).sum(), z)[0]


def _penalty(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = x.clone().requires_grad_()
    return y + torch.autograd.grad(self.linear(z).pow(2).sum(), z, create_graph=True)[0]


def _jacobian(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return y @ torch.func.jacrev(lambda row: self.linear(row).tanh())(x[0, 0].detach())


class Complex(nn.Module):
    def __init__(self, convolution: bool) -> None:
        super().__init__()
        kind: Any = nn.Conv1d(LENGTH, LENGTH, 1, dtype=torch.complex64) if convolution else None
        self.inner = kind or nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(torch.complex(x, x.square()))
        return y.real + y.imag


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.double()).float()


class Decaying(nn.Module):
    """A buffer that each forward changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.9)
        return self.linear(x) * self.scale


def _own_forward() -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    linear.forward = types.MethodType(lambda self, x: 3 * nn.Linear.forward(self, x), linear)
    return linear


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            return x @ weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dy @ weight.t(), x.flatten(0, -2).t() @ dy.flatten(0, -2)


def _clipping_its_sum() -> nn.Module:
    """A hook changes the gradient that has been summed so far, beside a function of the user's own."""
    block = Block(lambda self, x, y: Product.apply(y.float(), self.more))
    block.more = nn.Parameter(torch.randn(WIDTH, WIDTH))
    block.linear.weight.register_post_accumulate_grad_hook(_clip)
    return block


def _clip(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.clamp_(-0.01, 0.01)


CASES: dict[str, Callable[[], nn.Module]] = {
    "in place after a Linear": lambda: Block(_add),
    "in place after a Linear without a bias": lambda: Block(_add, bias=False),
    "in place after a Linear on two dimensions": lambda: Block(_flat),
    "an activation in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "a complex Linear": lambda: Complex(convolution=False),
    "a complex convolution": lambda: Complex(convolution=True),
    "a norm after a Linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()),
    "doubles": lambda: Double(),
    "a gradient inside the forward": lambda: Block(_inner_gradient),
    "a penalty on a gradient": lambda: Block(_penalty),
    "vmap": lambda: Block(lambda self, x, y: y + torch.func.vmap(self.linear)(x)),
    "a Jacobian": lambda: Block(_jacobian),
    "a forward of the instance's own": _own_forward,
    "a buffer changed in place": lambda: Decaying(),
    "a hook that changes the sum": _clipping_its_sum,
    "a weight that its parent uses too": lambda: Block(lambda self, x, y: y.tanh() @ self.linear.weight.t()),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_layer_equals_plain_torch(case: str, autocast: bool) -> None:
    """One schedule here, all of them in the slow test below."""
    _check("zb-h1", case, autocast)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", list(SCHEDULES)[1:])
def test_every_layer_under_every_schedule(schedule: str) -> None:
    for case in CASES:
        for autocast in (False, True):
            _check(schedule, case, autocast)


def _check(schedule: str, case: str, autocast: bool) -> None:
    both = []
    for _ in range(2):
        torch.manual_seed(1)
        both.append([CASES[case]() for _ in range(4)])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the gradients of")  # a weight was left to I, since W was not equal
        assert not differences(schedule, *both, seed=5, autocast=autocast), (schedule, case, autocast)


def _models(number: int = 2) -> list[list[nn.Module]]:
    found = []
    for _ in range(number):
        torch.manual_seed(1)
        found.append([Block(lambda self, x, y: y.tanh() * self.linear.weight.sum()) for _ in range(4)])
    return found


def _lose_a_contribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The analysis no longer sees the edge by which the sum of the weight leads back to the weight."""
    entering = Structure._entering

    def some(self: Structure) -> list[list[tuple[int, int]]]:
        return [
            [(node, slot) for node, slot in edges if self.types[node].__name__ != "SumBackward0"]
            for edges in entering(self)
        ]

    monkeypatch.setattr(Structure, "_entering", some)


def test_the_check_notices_a_lost_contribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """And trains on without a difference: the weights concerned are left to I."""
    _lose_a_contribution(monkeypatch)
    with pytest.warns(UserWarning, match=r"the gradients of 2.linear.weight, 3.linear.weight are computed in I"):
        assert not differences("zb-h1", *_models(), seed=5)


def test_without_the_check_a_lost_contribution_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with plain torch is able to fail."""
    _lose_a_contribution(monkeypatch)
    monkeypatch.setattr(deferred, "compare", lambda promise, weights: (set(), set(weights)))
    wrong = differences("zb-h1", *_models(), seed=5)
    assert "3.linear.weight" in wrong


def test_a_wrong_formula_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promise.Linear, "gradients", lambda self, dy, _: [(self._weight, dy.t().mm(self._x) * 1.0001)])
    with pytest.warns(UserWarning, match=r"\d.linear.bias, \d.linear.weight|\d.linear.weight, \d.linear.bias"):
        assert not differences("zb-v", *([Block(_flat) for _ in range(4)] for _ in _seeds()), seed=5)


def _seeds() -> Iterator[int]:
    for seed in (1, 1):
        torch.manual_seed(seed)
        yield seed


def test_modules_are_left_as_they_were_found() -> None:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4)]
    before = [{id(part): set(vars(part)) for part in layer.modules()} for layer in layers]
    pipe = Pipeline(layers, nn.functional.mse_loss, schedule="zb-h1", num_microbatches=3, num_ranks=2)
    x = torch.randn(6, WIDTH)
    for _ in range(2):
        pipe.train_step(x, x, update=False)
        assert before == [{id(part): set(vars(part)) for part in layer.modules()} for layer in layers]
        for layer in layers:
            torch.save(layer, io.BytesIO())
    pipe.close()


def _unit(queue: WeightQueue, module: nn.Module, number: int, output: Tensor, scale: float = 1.0) -> None:
    queue.open(number, module.parameters())
    queue.backward([get_gradient_edge(output)], [torch.full_like(output, scale)])
    queue.close()


def test_graphs_that_never_repeat_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the first structure everything is left to I, and the order of units holds."""
    monkeypatch.setattr(deferred, "MOST_STRUCTURES", 1)
    both = []
    for _ in range(2):
        torch.manual_seed(1)
        both.append([Block(lambda self, x, y: y.tanh() if x.sum() > 0 else self.linear(y)) for _ in range(4)])
    assert not differences("zb-h1", *both, seed=7)


def test_a_gradient_of_zeros_proves_nothing() -> None:
    """The weight waits from the unit on that follows one with a gradient; zeros are shown again at 2, 4, 8 …"""
    module = nn.Linear(WIDTH, WIDTH)
    queue = WeightQueue(["weight", "bias"])
    for number, scale in enumerate([0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]):
        _unit(queue, module, number, module(torch.ones(2, WIDTH)), scale)
        assert not queue.waited(), number
        queue.run(number)
    _unit(queue, module, 8, module(torch.ones(2, WIDTH)))
    assert queue.waited() == {"weight", "bias"}


def test_a_hook_that_comes_later_is_called() -> None:
    """A weight with a hook is left to I; one on the product's node too, from the unit on that has it."""
    torch.manual_seed(0)
    module, seen = nn.Linear(WIDTH, WIDTH), []
    queue = WeightQueue(["weight", "bias"])
    for number in range(2):
        _unit(queue, module, number, module(torch.randn(2, WIDTH)))
        queue.run(number)
    assert queue.waited() == {"weight", "bias"}
    output = module(torch.randn(2, WIDTH))
    output.grad_fn.register_hook(lambda gradients, _: seen.append([gradient is not None for gradient in gradients]))
    _unit(queue, module, 2, output)
    assert seen == [[True, False, True]]
    module.weight.register_post_accumulate_grad_hook(lambda _: seen.append("weight"))
    module.zero_grad()
    _unit(queue, module, 3, module(torch.randn(2, WIDTH)))
    queue.run(2)
    seen.clear()
    queue.run(3)
    assert seen == ["weight"], "when its gradient has been added, which keeps the order of units"


def test_the_order_of_units_holds_where_only_some_of_them_wait() -> None:
    """Unit 2 has another graph, so I makes its gradient before the W of unit 1: it is added after it all the same."""
    torch.manual_seed(0)
    module, plain = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
    plain.load_state_dict(module.state_dict())
    queue = WeightQueue(["weight"])
    inputs = [torch.randn(5, WIDTH) * 10**number for number in range(5)]

    def output(linear: nn.Linear, number: int) -> Tensor:
        y = linear(inputs[number]).square()
        return y * linear.weight.mean() if number in (2, 4) else y

    for number in range(5):
        _unit(queue, module, number, output(module, number))
        output(plain, number).backward(torch.ones(5, WIDTH))
        if number == 0:
            queue.run(0)
    for number in range(1, 5):
        queue.run(number)
    assert torch.equal(module.weight.grad, plain.weight.grad)


def test_a_tensor_that_changes_between_i_and_w_is_an_error() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    queue = WeightQueue(["weight", "bias"])
    for number in range(2):
        x = torch.ones(2, WIDTH)
        _unit(queue, module, number, module(x))
        if number == 0:
            queue.run(0)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: a tensor of shape \(2, 4\)"):
        queue.run(1)


class Compiled(nn.Module):
    """A Linear whose product a compiled function makes; the instances share what is compiled."""

    def __init__(self, compiled: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.compiled = nn.Linear(WIDTH, WIDTH), compiled

    def forward(self, x: Tensor) -> Tensor:
        return self.compiled(x, self.linear.weight, self.linear.bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.linear(x, weight, bias).relu_()


ONE_OF_THEM = (pytest.mark.slow, pytest.mark.rotates(1))


@pytest.mark.parametrize(
    "backend", ["eager", *(pytest.param(name, marks=ONE_OF_THEM) for name in ("aot_eager", "inductor"))]
)
def test_compiled_layers(backend: str) -> None:
    import torch._inductor.config as inductor

    compiled = torch.compile(_product, backend=backend)
    both = []
    for _ in range(2):
        torch.manual_seed(1)
        both.append([Block(_add), Block(_add), Compiled(compiled), Block(_add)])
    # monkeypatch would leave the setting hidden: torch's settings are no plain attributes
    with inductor.patch({"compile_threads": 1, "cpp_cache_precompile_headers": False}):
        assert not differences("zb-h1", *both, seed=5)
    torch._dynamo.reset()


def test_a_derivative_in_a_treated_layer() -> None:
    """What a recomputed forward saves is forgotten at once, so it cannot differentiate; the sentence says what to do."""
    layers = [Block(_inner_gradient) for _ in range(2)]
    pipe = Pipeline(layers, nn.functional.mse_loss, schedule="zb-h1", num_microbatches=2, num_ranks=1, recompute=1.0)
    x = torch.randn(4, LENGTH, WIDTH)
    with pytest.raises(UserError, match=r"computes a gradient inside its forward.*leave it out of `recompute`"):
        pipe.train_step(x, x, update=False)
