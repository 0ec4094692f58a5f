"""What the caller has switched on holds in every rank of the process, however many there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime_plain import D, accumulate, batch, gradients, mse, same, seeded
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vpipe import Pipeline


def _layers() -> list[nn.Module]:
    return seeded(lambda: [nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)) for _ in range(4)])


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return mse(output.float(), target)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("executor", ["plain", "threaded"])
def test_autocast_around_a_step(num_ranks: int, executor: str) -> None:
    x, y = batch()
    plain = _layers()
    pipe = Pipeline(_layers(), _loss, num_ranks=num_ranks, schedule="gpipe", executor=executor)
    with torch.autocast("cpu", torch.bfloat16):
        expected = accumulate(plain, _loss, x, y, 4)
        assert pipe.train_step(x, y, update=False) == expected
    same(pipe.gradients(), gradients(plain))
    without = _layers()
    assert accumulate(without, _loss, x, y, 4) != expected, "the case must be able to fail"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_steps_in_one_autocast_read_the_updated_weights(num_ranks: int) -> None:
    x, y = batch()
    plain = _layers()
    optimizer = torch.optim.SGD([p for layer in plain for p in layer.parameters()], lr=0.1)
    pipe = Pipeline(_layers(), _loss, num_ranks=num_ranks, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
    expected = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            expected.append(accumulate(plain, _loss, x, y, 4))
        optimizer.step()
        optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        assert [pipe.train_step(x, y) for _ in range(2)] == expected


class Asks(nn.Module):
    """Notes what is switched on where it runs."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        self.seen.append(
            (torch.is_inference_mode_enabled(), torch.get_default_dtype(), torch.get_default_device().type)
        )
        return self.linear(x)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_inference_mode_and_the_default_device(num_ranks: int) -> None:
    seen: list[Any] = []
    pipe = Pipeline([Asks(seen), Asks(seen)], mse, num_ranks=num_ranks, num_microbatches=1)
    x, _ = batch()
    with torch.inference_mode(), torch.device("meta"):
        pipe.forward(x)
    assert seen == [(True, torch.float32, "meta")] * 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_modes_that_watch_operations_see_all_ranks(num_ranks: int) -> None:
    x, y = batch()
    with FlopCounterMode(display=False) as counter:
        accumulate(_layers(), mse, x, y, 4)
    pipe = Pipeline(_layers(), mse, num_ranks=num_ranks)
    with FlopCounterMode(display=False) as found:
        pipe.train_step(x, y, update=False)
    assert found.get_total_flops() == counter.get_total_flops() > 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_saved_tensor_hooks_of_the_caller(num_ranks: int) -> None:
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor

    x, y = batch()
    pipe = Pipeline(_layers(), mse, num_ranks=num_ranks)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        pipe.train_step(x, y, update=False)
    ours, packed[:] = sorted(packed), []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        accumulate(_layers(), mse, x, y, 4)
    assert set(ours) == set(packed)
