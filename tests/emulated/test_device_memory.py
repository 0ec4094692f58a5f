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

WIDTH, ROWS, RANKS, UNITS, LAYERS = 64, 128, 2, 6, 4
ABOVE, BELOW = 0.08, 0.20
"""How far a peak may be from its prediction: above by what the rules do not count (blocks of 512 bytes, batches on
their way), below where terms do not meet (pipedream has its gradients only while the activations of a unit go)."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("gpipe", False), ("1f1b", False), ("1f1b", True), ("zb-h1", False), ("pipedream", False)],
)
def test_the_peak_is_the_predicted_one(schedule: str, recompute: bool) -> None:
    modules = [Block() for _ in range(LAYERS)]
    x = torch.randn(ROWS * UNITS, WIDTH)
    measuring = Measuring(nn.functional.mse_loss, optimizer, repeat=1, device=torch.device("emu:0"))
    costs, size = measure_layers([Layer(module) for module in modules], x[:ROWS], x[:ROWS], measuring)
    choice = Choice.RECOMPUTE if recompute else Choice.KEEP
    layout = PlannedLayout.of_counts([2, 2], [[choice] * 2] * RANKS)
    pipe_of = Pipe.of(schedule, RANKS, UNITS)
    expected = predict(Profile(tuple(costs), size, ROWS), layout, pipe_of, Machine.of(RANKS, None)).rank_memory
    gc.collect()
    before = [torch.accelerator.memory_allocated(rank) for rank in range(RANKS)]
    pipe = Pipeline(
        modules, nn.functional.mse_loss, schedule=schedule, num_microbatches=UNITS, num_ranks=RANKS, device="emu",
        optimizer=optimizer, recompute=1.0 if recompute else 0.0, skip_nonfinite=False,
    )  # fmt: skip
    pipe.train_step(x, x)
    for rank in range(RANKS):
        torch.accelerator.reset_peak_memory_stats(rank)
    pipe.train_step(x, x)
    found = [torch.accelerator.max_memory_allocated(rank) - before[rank] for rank in range(RANKS)]
    pipe.close()
    for mine, predicted in zip(found, expected, strict=True):
        assert 1 - BELOW <= mine / predicted <= 1 + ABOVE, (found, expected)
