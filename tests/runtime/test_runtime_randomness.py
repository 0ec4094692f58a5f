"""Random numbers tested directly: the replay draws them by the same function, so equality alone says nothing of them.

A change that gave every layer of a unit the same mask once passed every equality test.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.runtime.surroundings import key

WIDTH = 4096


class Noting(nn.Module):
    """Dropout that writes down which numbers it kept."""

    def __init__(self, masks: list[Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.masks = masks

    def forward(self, x: Tensor) -> Tensor:
        kept = nn.functional.dropout(torch.ones_like(x), 0.25)
        self.masks.append((kept != 0).flatten())
        return x * kept * self.weight


def masks(seed: int, schedule: str = "gpipe", num_ranks: int = 2, num_steps: int = 2) -> list[list[Tensor]]:
    """Per layer, the masks of its units in order: 4 layers, 3 units a step."""
    found: list[list[Tensor]] = [[] for _ in range(4)]
    pipe = Pipeline(
        [Noting(mine) for mine in found],
        lambda y, _: y.mean(),
        schedule=schedule,
        num_microbatches=3,
        num_ranks=num_ranks,
        seed=seed,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )
    for _ in range(num_steps):
        pipe.train_step(torch.ones(3, WIDTH), torch.zeros(3, 1))
    return found


def test_layers_units_steps_and_seeds_draw_different_numbers() -> None:
    drawn = {
        (seed, layer, unit): mask
        for seed in (0, 2**40)
        for layer, units in enumerate(masks(seed))
        for unit, mask in enumerate(units)
    }
    assert len(drawn) == 2 * 4 * 6
    for (one, a), (other, b) in combinations(drawn.items(), 2):
        agreeing = (a == b).float().mean().item()
        # Independent masks agree in 0.75² + 0.25² = 0.625 of the places, with a spread of 0.0076.
        assert abs(agreeing - 0.625) < 6 * 0.0076, f"{one} and {other} agree in {agreeing:.1%} of their places"


def test_a_mask_keeps_as_many_as_it_should() -> None:
    """Each share within five standard deviations of 0.75, and all of them together too."""
    shares = [mask.float().mean().item() for units in masks(7) for mask in units]
    spread = (0.75 * 0.25 / WIDTH) ** 0.5
    assert all(abs(share - 0.75) < 5 * spread for share in shares)
    assert abs(sum(shares) / len(shares) - 0.75) < 5 * spread / len(shares) ** 0.5


def test_neither_schedule_nor_ranks_change_them() -> None:
    expected = masks(3)
    for schedule, num_ranks in (("1f1b", 4), ("zb-v", 2), ("gpipe", 1)):
        found = masks(3, schedule, num_ranks)
        assert all(torch.equal(a, b) for mine, theirs in zip(found, expected, strict=True) for a, b in zip(mine, theirs, strict=True))  # fmt: skip


def test_keys_differ_and_use_all_their_bits() -> None:
    keys = [key(seed, unit, layer) for seed in (0, 1, 2, 2**62) for unit in range(50) for layer in range(50)]
    assert len(set(keys)) == len(keys)
    for bit in range(64):
        share = sum(number >> bit & 1 for number in keys) / len(keys)
        assert abs(share - 0.5) < 5 * 0.5 / len(keys) ** 0.5, f"bit {bit} is set in {share:.1%} of the keys"
    assert len({key(0, 1, 2), key(0, 2, 1), key(1, 0, 2), key(2, 1, 0), key(1, 2, 0), key(2, 0, 1)}) == 6
