"""Input gradients now, weight gradients later: bit-equal to autograd over many shapes, and one recompute per microbatch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from vpipe.runtime.split.deferred import WeightQueue

COUNT = settings(max_examples=25, deadline=None)
SIZES = st.integers(1, 9)


def _same(
    module: nn.Module, inputs: list[Tensor], *, input_grad: bool = True, autocast: bool = False, copied: Any = None
) -> set[str]:
    """Four units by I and W and by autograd: outputs, input and weight gradients. The first of a structure is compared by
    the engine itself. Returns the weights that waited."""
    module.zero_grad()
    split = copied(module) if copied is not None else copy.deepcopy(module)
    weights = dict(split.named_parameters())
    queue = WeightQueue(list(weights))
    context = (lambda: torch.autocast("cpu", torch.bfloat16)) if autocast else nullcontext
    waiting = []
    for number, x in enumerate([*inputs, *inputs]):
        wants = input_grad and x.is_floating_point()
        mine, theirs = _leaf(x, wants), _leaf(x, wants)
        with context():
            found, expected = split(mine), module(theirs)
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype
        if not expected.requires_grad:
            continue
        dy = torch.randn_like(expected)
        queue.open(number, weights.values())
        queue.backward([get_gradient_edge(found)], [dy])
        queue.close()
        waiting.append(number)
        expected.backward(dy)
        if wants:
            assert mine.grad is not None
            assert torch.equal(mine.grad, theirs.grad)
    for number in waiting:
        queue.run(number)
    for (name, p), q in zip(split.named_parameters(), module.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
        assert p.grad is None or p.grad.stride() == q.grad.stride(), name
    return queue.waited()


def _leaf(x: Tensor, wants: bool) -> Tensor:
    """A leaf with the same strides."""
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_(wants)


@st.composite
def _inputs(draw: Callable[..., Any], width: int, dims: tuple[int, ...] = (2, 3, 4)) -> list[Tensor]:
    torch.manual_seed(draw(st.integers(0, 1000)))
    found = []
    for _ in range(2):
        shape = [draw(SIZES) for _ in range(draw(st.sampled_from(dims)) - 1)]
        if draw(st.booleans()) and shape:
            found.append(torch.randn(width, *shape).movedim(0, -1))  # not contiguous
        else:
            found.append(torch.randn(*shape, width))
    return found


@COUNT
@given(st.data(), SIZES, SIZES, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_linear(data: Any, width: int, out: int, bias: bool, frozen: bool, input_grad: bool, autocast: bool) -> None:
    module = nn.Linear(width, out, bias=bias)
    module.weight.requires_grad_(not frozen)
    _same(module, data.draw(_inputs(width, (1, 2, 3, 4))), input_grad=input_grad, autocast=autocast)


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (2, 3, 5, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("input_grad", [False, True])
def test_a_linear_waits(shape: tuple[int, ...], dtype: torch.dtype, bias: bool, input_grad: bool) -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 3, bias=bias, dtype=dtype)
    inputs = [torch.randn(*shape).to(dtype) for _ in range(2)]
    found = _same(module, inputs, input_grad=input_grad)
    assert found == {"weight", "bias"} & set(dict(module.named_parameters()))


def test_a_linear_waits_under_autocast() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    found = _same(module, [torch.randn(3, 5, 4) for _ in range(2)], autocast=True)
    assert found == set(dict(module.named_parameters()))


@pytest.mark.parametrize("input_grad", [False, True])
def test_other_weights_wait(input_grad: bool) -> None:
    torch.manual_seed(0)
    rows = [torch.randn(2, 4, 6) for _ in range(2)]
    for module in (nn.LayerNorm(6), nn.LayerNorm(6, bias=False), nn.Conv1d(4, 3, 2), nn.ConvTranspose1d(4, 3, 2)):
        assert _same(module, rows, input_grad=input_grad) == set(dict(module.named_parameters()))
    assert _same(nn.Embedding(5, 3), [torch.randint(0, 5, (2, 4)) for _ in range(2)]) == {"weight"}


@COUNT
@given(st.data(), st.integers(2, 9), SIZES, st.one_of(st.none(), st.integers(0, 1)), st.booleans())
def test_embedding(data: Any, rows: int, width: int, padding: int | None, autocast: bool) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    shape = data.draw(st.lists(SIZES, min_size=1, max_size=3))
    _same(
        nn.Embedding(rows, width, padding_idx=padding, scale_grad_by_freq=data.draw(st.booleans())),
        [torch.randint(0, rows, shape) for _ in range(2)],
        autocast=autocast,
    )


@COUNT
@given(st.data(), SIZES, st.booleans(), st.sampled_from(["", "weight", "bias"]), st.booleans(), st.booleans())
def test_layer_norm(data: Any, width: int, bias: bool, frozen: str, input_grad: bool, autocast: bool) -> None:
    module = nn.LayerNorm(width, bias=bias)
    if getattr(module, frozen or "nothing", None) is not None:
        getattr(module, frozen).requires_grad_(False)
    _same(module, data.draw(_inputs(width)), input_grad=input_grad, autocast=autocast)


@COUNT
@given(st.data(), st.integers(1, 3), st.booleans(), st.integers(1, 2), st.integers(0, 2), st.booleans(), st.booleans())
def test_convolution(
    data: Any, dims: int, bias: bool, stride: int, padding: int, grouped: bool, input_grad: bool
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    module = kind(4, 6, 3, stride=stride, padding=padding, bias=bias, groups=2 if grouped else 1)
    size = [data.draw(st.integers(3, 6)) for _ in range(dims)]
    batch = [torch.randn(data.draw(st.integers(1, 3)), 4, *size) for _ in range(2)]
    _same(module, batch, input_grad=input_grad, autocast=data.draw(st.booleans()))
    _same(module, [torch.randn(4, *size)])


def test_unusual_options() -> None:
    for module in (
        nn.Embedding(5, 3, max_norm=1.0),
        nn.Conv1d(2, 2, 3, padding="same"),
        nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"),
        nn.Conv1d(2, 2, 3, dtype=torch.complex64),
        nn.RMSNorm(4),
        nn.GroupNorm(2, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        nn.MultiheadAttention(4, 2).out_proj,
    ):
        if isinstance(module, nn.Embedding):
            inputs = [torch.randint(0, 5, (4,)) for _ in range(2)]
        elif isinstance(module, nn.Conv1d):
            inputs = [torch.randn(2, 2, 8, dtype=module.weight.dtype) for _ in range(2)]
        else:
            inputs = [torch.randn(6, 4) for _ in range(2)]
        _same(module, inputs)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_weight_that_is_made_of_others() -> None:
    """The old weight norm leaves a plain Linear whose weight is no parameter: its gradient goes on."""
    torch.manual_seed(0)
    linear = nn.Linear(4, 3)
    twin = copy.deepcopy(linear)
    _same(nn.utils.weight_norm(linear), [torch.randn(6, 4)], copied=lambda _: nn.utils.weight_norm(twin))


class Experts(nn.Module):
    """The weights of three experts in one tensor, by hand as a factor on either side."""

    def __init__(self, left: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 4, dtype=dtype))
        self.left = left

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.weight, x) if self.left else torch.bmm(x, self.weight)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_batched_products_wait(left: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(3, 4, 4, dtype=torch.float32).to(dtype) for _ in range(2)]
    assert _same(Experts(left, dtype), inputs, input_grad=dtype is torch.float32) == {"weight"}


class Twice(nn.Module):
    """One product used twice in a forward, and a weight that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.again = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.again(self.two(torch.tanh(self.one(x))))))


def test_weights_that_are_used_twice() -> None:
    torch.manual_seed(1)
    _same(Twice(), [torch.randn(7, 4) for _ in range(2)])
