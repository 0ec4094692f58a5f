"""The emulated device computes what the CPU computes, to the bit, however its streams run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(2, 4, 2, 8).transpose(1, 2) for part in self.qkv(x.view(2, 4, 16)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(8, 16)
        return self.out(mixed)  # type: ignore[no-any-return]


class Tied(nn.Module):
    """An embedding whose weight is also the last layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.embedding(x.argmax(1))))  # type: ignore[no-any-return]


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.SiLU(), nn.Tanh()),
    "norms": lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.RMSNorm(16), nn.BatchNorm1d(16)),
    "attention": Attention,
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 16)),
    "tied": Tied,
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-foreach": lambda ps: torch.optim.AdamW(ps, 1e-2, foreach=True),
    "adam-single": lambda ps: torch.optim.Adam(ps, 1e-2, foreach=False),
    "sgd-momentum": lambda ps: torch.optim.SGD(ps, 1e-2, momentum=0.9),
}


def trained(block: nn.Module, device: str, make: Callable[[Any], torch.optim.Optimizer]) -> list[Tensor]:
    """Losses, gradients and weights of three steps with clipping."""
    module = copy.deepcopy(block).to(device)
    optimizer = make(module.parameters())
    found: list[Tensor] = []
    for step in range(3):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.mse_loss(module(x), torch.ones_like(x)) + module(x).logsumexp(1).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        found += [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
        optimizer.step()
    return [tensor.cpu() for tensor in [*found, *module.state_dict().values()]]


@pytest.mark.parametrize("name", BLOCKS)
def test_training_equals_the_cpu(name: str, mode: str) -> None:
    torch.manual_seed(0)
    block = BLOCKS[name]()
    ours, theirs = (trained(block, device, OPTIMIZERS["adamw-foreach"]) for device in ("emu:0", "cpu"))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_equal_the_cpu(name: str) -> None:
    block = nn.Linear(16, 16)
    ours, theirs = (trained(block, device, OPTIMIZERS[name]) for device in ("emu:0", "cpu"))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_moving_keeps_tied_weights_tied() -> None:
    moved = Tied().to("emu:1")
    assert moved.head.weight is moved.embedding.weight


def test_no_warnings_about_resized_outputs(capfd: pytest.CaptureFixture[str]) -> None:
    """The prototype's rough edge: an ``out=`` scalar is a placeholder whose size the operator decides. Streams are
    threads of C++, so what they warn of is written to the error output."""
    target = torch.zeros(4, 4, device="emu:0")
    for loss in (F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits):
        x = torch.randn(4, 4, device="emu:0", requires_grad=True)
        (gradient,) = torch.autograd.grad(loss(x, target), x)
        y = x.detach().cpu().requires_grad_()
        assert torch.equal(gradient.cpu(), torch.autograd.grad(loss(y, target.cpu()), y)[0])
    assert "resized" not in capfd.readouterr().err


def test_operators_that_depend_on_values_are_counted_and_can_raise(emulated: Any) -> None:
    x = torch.arange(6.0, device="emu:0")
    torch.accelerator.synchronize(0)
    emulated.reset()
    y = (x * 2).sum() + x.max()
    assert not emulated.syncs()
    assert float(y) == 35.0
    assert int((x > 2).nonzero().numel()) == 3
    assert sum(emulated.syncs().values()) == 2
    emulated.settings(sync_mode=2)
    with pytest.raises(RuntimeError, match="synchronizing operation"):
        x.tolist()


def test_memory_is_counted_and_ends(emulated: Any) -> None:
    before = torch.accelerator.memory_allocated(0)
    x = torch.empty(1 << 20, device="emu:0")
    assert torch.accelerator.memory_allocated(0) - before == 4 << 20
    del x
    assert torch.accelerator.memory_allocated(0) == before
    assert torch.accelerator.max_memory_allocated(0) >= before + (4 << 20)
    kept = torch.accelerator.memory_reserved(0)
    emulated.settings(capacity=kept + (1 << 20))
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(kept + (2 << 20), dtype=torch.uint8, device="emu:0")  # more than other tests have left


def test_random_numbers_belong_to_the_device() -> None:
    torch.manual_seed(3)
    dropped = F.dropout(torch.ones(64, device="emu:0"))
    torch.manual_seed(3)
    assert torch.equal(dropped.cpu(), F.dropout(torch.ones(64, device="emu:0")).cpu())
    assert not torch.equal(dropped.cpu(), F.dropout(torch.ones(64, device="emu:0")).cpu())
    own = torch.Generator("emu:1").manual_seed(3)
    drawn = torch.randn(8, device="emu:1", generator=own)
    assert torch.equal(drawn.cpu(), torch.randn(8, device="emu:1", generator=own.manual_seed(3)).cpu())


def test_autocast_and_gradient_scaling() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    for kind in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", kind):
            expected = layer(x)
        with torch.autocast("emu", kind):
            found = copy.deepcopy(layer).to("emu:0")(x.to("emu:0"))
        assert found.dtype is kind
        assert torch.equal(found.cpu(), expected)


def test_devices_do_not_mix() -> None:
    here, there = torch.ones(3, device="emu:0"), torch.ones(3, device="emu:1")
    with pytest.raises(RuntimeError, match="same device"):
        _ = here + there
    with pytest.raises(RuntimeError, match="same device"):
        _ = here + torch.ones(3)
    assert torch.equal((here + there.to("emu:0")).cpu(), torch.full((3,), 2.0))


def test_errors_of_kernels_come_up_at_the_next_wait() -> None:
    nn.Embedding(4, 4).to("emu:0")(torch.tensor([9], device="emu:0"))
    with pytest.raises(IndexError):
        torch.accelerator.synchronize(0)


def test_results_that_the_host_waits_for_are_not_overwritten(mode: str) -> None:
    """Their memory was just freed, so the stream still overwrites it. (Ranks that had lost another one computed with
    such results, and failed in the next kernel.)"""
    x = torch.ones(64, device="emu:0")
    for _ in range(8):
        torch.empty(64, dtype=torch.int64, device="emu:0")
        assert torch.equal(torch.nonzero(x).cpu().flatten(), torch.arange(64))


def test_what_ends_the_caller_passes_through_kernels_of_python() -> None:
    """A signal's exception, raised in the Python function that infers a shape, is not taken for a missing one."""
    library = torch.library.Library("emulated_test", "DEF")
    library.define("interrupted(Tensor x) -> Tensor")

    def interrupted(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    library.impl("interrupted", interrupted, "Meta")
    library.impl("interrupted", torch.clone, "CPU")
    with pytest.raises(KeyboardInterrupt):
        torch.ops.emulated_test.interrupted(torch.ones(2, device="emu:0"))
