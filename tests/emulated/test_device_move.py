"""Layers move between devices and no bit knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_cases import batches, plain

from vpipe import Pipeline


def train(device: str, moves: bool, optimizer: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    loss = torch.nn.functional.mse_loss
    pipe = Pipeline(plain(6), loss, num_ranks=2, device=device, optimizer=optimizer, seed=3, clip_norm=0.5)
    layouts = [pipe.layout.with_counts([1, 5]), pipe.layout.with_counts([4, 2]).with_ranks([1, 0])]
    losses = []
    for step, batch in enumerate(batches(3, 8)):
        losses.append(pipe.train_step(*batch))
        if moves and step < 2:
            pipe.move(layouts[step])
            homes = {held.rank: next(held.module.parameters()).device for held in pipe.held_layers()}
            assert homes == dict(enumerate(pipe.devices))
    return losses, {name: tensor.cpu() for name, tensor in pipe.state_dict().items()}


@pytest.mark.parametrize("fused", [False, True])
def test_moves_between_devices_change_no_bit(fused: bool, mode: str) -> None:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01, fused=fused)

    losses, state = train("emu", True, adam)
    expected, wanted = train("emu", False, adam)
    assert losses == expected
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
