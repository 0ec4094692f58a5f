"""Proof on whatever accelerator is present: the same program on several devices and on one gives the same bits.

No GPU was at hand where vpipe was written. This is the part of its equality tests that needs nothing but the device: a
program whose ranks have devices of their own, where every copy and every wait between them counts, against the same
program on one device, where the order of one stream does it all.

Beside equal schedules ``vpipe doctor --devices`` finds out what the devices are, which reach which, and how much of a
copy hides behind compute.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.runtime.device import compute_stream, current, own_memory, to_have_one
from vpipe.runtime.pipeline import Pipeline
from vpipe.runtime.transport.handover import HandoverStreams
from vpipe.schedule import catalog
from vpipe.train.reporting.peaks import device_name

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


SIZE, PRODUCTS = 1024, 8
"""Of the matrices that keep a device busy while a copy is under way, and how many products."""
COPY = 1 << 24
"""Bytes of that copy."""


class Overlap(NamedTuple):
    """Seconds of the products alone, of the copy alone, and of both at once."""

    compute: float
    copy: float
    together: float

    @property
    def hidden(self) -> float:
        """The share of the shorter one that the longer one hides."""
        shorter = min(self.compute, self.copy)
        return max(0.0, min(1.0, (self.compute + self.copy - self.together) / shorter)) if shorter else 0.0


def facts(kind: str) -> dict[str, str]:
    """What to send back beside the results."""
    first = torch.device(kind, 0)
    memory = own_memory(first)
    try:
        backend = dist.get_default_backend_for_device(first)
    except ValueError:
        backend = "none"
    return {
        "torch": torch.__version__,
        "devices": f"{torch.accelerator.device_count()} × {device_name(torch.device(first))}",
        "memory": f"{memory / 2**30:.1f} GiB" if memory else "n/a",
        "backend": backend,
    }


def offered() -> dict[str, str]:
    """The facts of the accelerators that torch finds, if it finds any."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return facts(found.type) if found is not None else {}


class DeviceWays(NamedTuple):
    """The ways between all devices of this machine."""

    num_ways: int
    broken: list[str]
    """What one device wrote and another did not get, as "0 → 1"."""
    slowest: float
    fastest: float
    """Bytes a second, of those that work."""


def reach(kind: str) -> DeviceWays:
    """A block goes from every device to every other one and is compared there."""
    devices = [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
    ways = [(here, there) for here in devices for there in devices if here != there]
    rates, broken = [], []
    for here, there in ways:
        sent = torch.arange(COPY // 8, device=here) * (here.index + 3)
        sent.to(there)  # the first one may open the way
        torch.accelerator.synchronize(here)
        begin = perf_counter()
        found = sent.to(there)
        torch.accelerator.synchronize(there)
        rates.append(COPY / (perf_counter() - begin))
        if not torch.equal(found.cpu(), sent.cpu()):
            broken.append(f"{here.index} → {there.index}")
    return DeviceWays(len(ways), broken, min(rates, default=0.0), max(rates, default=0.0))


def overlap(kind: str) -> Overlap:
    """Matrix products on device 0 and a copy from it to device 1, each alone and both at once."""
    here, there = torch.device(kind, 0), torch.device(kind, 1)
    lane = HandoverStreams(here, there)
    with current(here):
        matrix, bytes_ = torch.ones(SIZE, SIZE, device=here), torch.ones(COPY, dtype=torch.uint8, device=here)

        def timed(computes: bool, copies: bool) -> float:
            torch.accelerator.synchronize(here)
            begin = perf_counter()
            carried = lane.carry(bytes_) if copies else None
            for _ in range(PRODUCTS if computes else 0):
                matrix @ matrix
            compute_stream(here).synchronize()
            if carried is not None and carried.arrived is not None:
                carried.arrived.synchronize()
            return perf_counter() - begin

        timed(True, True)
        return Overlap(timed(True, False), timed(False, True), timed(True, True))
