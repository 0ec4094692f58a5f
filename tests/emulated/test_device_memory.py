"""What the allocators of devices give out at most is what the planner's rules and the simulated order say."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.layer import Layer
from vpipe.plan.costs import Profile
from vpipe.plan.layout import PlannedLayout
from vpipe.plan.memory import Choice
from vpipe.plan.predict import Machine, Pipe, predict
from vpipe.plan.profile import Measuring, measure_layers
from vpipe.runtime.device import current
from vpipe.runtime.prefetch import Prefetch

WIDTH, ROWS = 64, 128
ABOVE, BELOW = 0.08, 0.20
"""How far a peak may be from its prediction: above by what the rules do not count (blocks of 512 bytes, batches on
their way), below where terms do not meet (pipedream has its gradients only while the activations of a unit go)."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Reader(nn.Module):
    """Reads what flows through, and a value that was written long before; it saves nothing, so messages show."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        return x + early * 2.0 + self.bias


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.bias
        return y, y * 2.0


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def peaks_of(
    layers: list[Layer], schedule: str, layout: PlannedLayout, units: int, **options: Any
) -> tuple[list[int], tuple[int, ...]]:
    """Of the second step: what the allocators have given out at most, and what is predicted for a device."""
    ranks = layout.num_stages
    x = torch.randn(ROWS * units, WIDTH)
    measuring = Measuring(nn.functional.mse_loss, optimizer, repeat=1, device=torch.device("emu:0"))
    costs, size = measure_layers(layers, x[:ROWS], x[:ROWS], measuring)
    profile = Profile(tuple(costs), size, ROWS, swap_bandwidth=1e9, device={"memory_bytes": 1e12})
    expected = predict(profile, layout, Pipe.of(schedule, ranks, units), Machine.of(ranks, None)).rank_memory
    gc.collect()
    before = [torch.accelerator.memory_allocated(rank) for rank in range(ranks)]
    pipe = Pipeline(
        layers, nn.functional.mse_loss, schedule=schedule, num_microbatches=units, num_ranks=ranks, device="emu",
        partition=list(layout.counts), optimizer=optimizer, skip_nonfinite=False, **options,
    )  # fmt: skip
    pipe.train_step(x, x)
    for rank in range(ranks):
        torch.accelerator.reset_peak_memory_stats(rank)
    pipe.train_step(x, x)
    found = [torch.accelerator.max_memory_allocated(rank) - before[rank] for rank in range(ranks)]
    pipe.close()
    return found, expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("gpipe", False), ("1f1b", False), ("1f1b", True), ("zb-h1", False), ("pipedream", False)],
)
def test_the_peak_is_the_predicted_one(schedule: str, recompute: bool) -> None:
    choice = Choice.RECOMPUTE if recompute else Choice.KEEP
    layout = PlannedLayout.of_counts([2, 2], [[choice] * 2] * 2)
    layers = [Layer(Block()) for _ in range(4)]
    found, expected = peaks_of(layers, schedule, layout, 6, recompute=1.0 if recompute else 0.0)
    for mine, predicted in zip(found, expected, strict=True):
        assert 1 - BELOW <= mine / predicted <= 1 + ABOVE, (found, expected)


SMALL = 0.05
"""Blocks of 512 bytes, and the batch itself."""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_one_swapped_unit_is_in_use_and_one_on_its_way(schedule: str) -> None:
    """A unit that came in took its memory while another had not let go of its own, so there were three."""
    layout = PlannedLayout.of_counts([2] * 4, [[Choice.SWAP] * 2] * 2 + [[Choice.KEEP] * 2] * 2)
    layers = [Layer(Block()) for _ in range(8)]
    found, expected = peaks_of(layers, schedule, layout, 8, swap={0, 1, 2, 3})
    assert all(mine <= (1 + SMALL) * predicted for mine, predicted in zip(found, expected, strict=True)), (
        found,
        expected,
    )


def test_room_for_messages_is_counted() -> None:
    """A value that many layers read has a gradient of each, and receives are posted before their sends can happen."""
    layers = [
        Layer(Forked(), writes=("x", "early")),
        *(Layer(Reader(), reads=("x", "early"), writes=("x",)) for _ in range(7)),
    ]
    layout = PlannedLayout.of_counts([1, 2, 2, 3], [[Choice.KEEP] * count for count in (1, 2, 2, 3)])
    found, expected = peaks_of(layers, "1f1b", layout, 8)
    message = 2 * ROWS * WIDTH * 4  # of a unit that is under way through a stage which saves nothing of it
    assert all(mine <= predicted + message for mine, predicted in zip(found, expected, strict=True)), (found, expected)


def test_a_batch_that_was_read_goes_though_its_copy_has_not_run(emulated: Any) -> None:
    """What kept the pinned memory of a unit kept the unit too: with a host far ahead of the copies, all of them."""
    device = torch.device("emu:0")
    feed = torch.Stream(device)
    units = [torch.randn(ROWS, WIDTH) for _ in range(6)]
    prefetch = Prefetch(units.__getitem__, range(len(units)), device, feed)
    with current(device):
        with feed:
            emulated.native.sleep(1e5)
        before = torch.accelerator.memory_allocated(0)
        torch.accelerator.reset_peak_memory_stats(0)
        for microbatch in range(len(units)):
            prefetch(microbatch)
    found = torch.accelerator.max_memory_allocated(0) - before
    assert found == 2 * units[0].nbytes, "the unit that is read, and the next"
