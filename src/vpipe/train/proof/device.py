"""Proof on whatever accelerator is present: the same program on several devices and on one gives the same bits.

No GPU was at hand where vpipe was written. This is the part of its equality tests that needs nothing but the device: a
program whose ranks have devices of their own, where every copy and every wait between them counts, against the same
program on one device, where the order of one stream does it all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.runtime.device import to_have_one
from vpipe.runtime.pipeline import Pipeline
from vpipe.schedule import catalog

WIDTH, NUM_LAYERS, NUM_MICROBATCHES, NUM_STEPS = 64, 8, 8, 3
MOST_RANKS = 4


class Proof(NamedTuple):
    """What one schedule came to."""

    schedule: str
    options: str
    num_ranks: int
    equal: bool
    detail: str
    seconds: float


def accelerator() -> str:
    """The type of this machine's accelerators, of which the proof needs two."""
    if not torch.accelerator.is_available():
        raise UserError(f"torch finds no accelerator on this machine; {to_have_one()}, or leave --devices out")
    offered = torch.accelerator.current_accelerator()
    assert offered is not None
    found = torch.accelerator.device_count()
    if found < 2:
        raise UserError(
            f"this machine has {found} {offered.type} device, but the proof compares several with one; "
            "run it where there are two"
        )
    return offered.type


def prove() -> Iterator[Proof]:
    """Every schedule on the devices of this machine; the slowest part is torch's first use of a device."""
    kind = accelerator()
    num_ranks = min(torch.accelerator.device_count(), MOST_RANKS)
    variants: list[dict[str, Any]] = [{}, {"recompute": 0.5}, {"swap": 1.0}]
    for number, entry in enumerate(catalog.entries()):
        yield _proof(entry.name, kind, num_ranks, variants[number % len(variants)])


def _proof(schedule: str, kind: str, num_ranks: int, options: dict[str, Any]) -> Proof:
    begin = perf_counter()
    text = ", ".join(f"{name} {value}" for name, value in options.items())
    try:
        apart, together = (_trained(schedule, device, num_ranks, options) for device in (kind, f"{kind}:0"))
    except RuntimeError as error:
        return Proof(schedule, text, num_ranks, False, str(error).splitlines()[0], perf_counter() - begin)
    different = [name for name, value in together.items() if not torch.equal(value, apart[name])]
    detail = f"{different[0]} and {len(different) - 1} more differ" if different else ""
    return Proof(schedule, text, num_ranks, not different, detail, perf_counter() - begin)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + nn.functional.dropout(grown, 0.1, self.training)


def _trained(schedule: str, device: str, num_ranks: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Losses and weights after a few steps, in main memory."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [_Block() for _ in range(NUM_LAYERS)]
        batches = torch.randn(NUM_STEPS, 2, 16 * NUM_MICROBATCHES, WIDTH)
    pipe = Pipeline(
        copy.deepcopy(layers),
        nn.functional.mse_loss,
        schedule=schedule,
        num_microbatches=NUM_MICROBATCHES,
        num_ranks=num_ranks,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-3),
        device=device,
        **options,
    )
    losses = [pipe.train_step(inputs, targets) for inputs, targets in batches]
    found = {name: tensor.detach().cpu() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return {"the loss": torch.tensor(losses, dtype=torch.float64)} | found
