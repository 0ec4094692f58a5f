"""Layers move between devices and no bit knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_cases import OPTIMIZERS, TIED, batches, plain
from emulated_ranks import on_ranks
from torch import nn

from vpipe import Pipeline
from vpipe.runtime.departures import Staging, landed


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


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_moves_between_devices_change_no_bit(fused: bool, mode: str) -> None:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01, fused=fused)

    losses, state = train("emu", True, adam)
    expected, wanted = train("emu", False, adam)
    assert losses == expected
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_no_move_and_no_copy_makes_a_stream() -> None:
    """torch has 32 of a device, for NCCL too: after thirty, what is fed would wait behind what is received."""
    pipe = Pipeline(plain(4), nn.functional.mse_loss, num_ranks=2, device="emu", optimizer=OPTIMIZERS["sgd"], swap=1.0)
    streams = []
    for step, batch in enumerate(batches(3, 8)):
        pipe.train_step(*batch)
        _, arrivals = Staging().copy({0: dict(next(iter(pipe.modules().values())).state_dict())})
        landed(arrivals)
        pipe.move(pipe.layout.with_counts([1 + step % 2, 3 - step % 2]))
        streams.append(torch.Stream(torch.device("emu", 0)).stream_id)
    pipe.close()
    assert (streams[2] - streams[1]) % 32 == 1


CASES: dict[str, tuple[str, dict[str, Any], list[tuple[list[int], list[int]]]]] = {
    "strangers": ("1f1b", {"clip_norm": 0.5}, [([2, 2, 2, 2], [2, 0, 3, 1]), ([1, 3, 1, 3], [1, 3, 0, 2])]),
    "replicas": ("1f1b", {"replicas": 2}, [([4, 4], [3, 1, 0, 2]), ([5, 3], [0, 2, 1, 3])]),
    "ties": ("zb-h1", {"tied": TIED}, [([3, 1, 2, 2], [3, 1, 0, 2])]),
    "versions": ("pipedream", {}, [([2, 2, 2, 2], [1, 3, 0, 2])]),
}
"""(schedule, options, layouts one after the other): at first ranks 0 and 2, and 1 and 3, have no messages."""


def moving(rank: int, name: str, device: str, moves: bool = True, num_ranks: int | None = None) -> Any:
    """Losses, weights, and how many messages of the last step went through the host."""
    from vpipe.runtime.transport.linked import LinkedTransport

    schedule, options, layouts = CASES[name]
    through_host: list[int] = []
    send = LinkedTransport.send

    def counted(self: Any, envelope: Any, *args: Any) -> None:
        through_host[-1] += envelope.step >= 0 and envelope.source >= 0
        send(self, envelope, *args)

    LinkedTransport.send = counted  # type: ignore[method-assign]
    through_host.append(0)
    pipe = Pipeline(
        plain(), nn.functional.mse_loss, schedule=schedule, num_microbatches=4, num_ranks=num_ranks, device=device,
        optimizer=OPTIMIZERS["adamw"], timeout=120, **options,
    )  # fmt: skip
    losses = []
    for number, batch in enumerate(batches(2 * len(layouts) + 2, 32)):
        through_host.append(0)
        losses.append(pipe.train_step(*batch))
        if moves and number % 2 and number // 2 < len(layouts):
            counts, order = layouts[number // 2]
            pipe.move(pipe.layout.with_counts(counts).with_ranks(order))
    LinkedTransport.send = send  # type: ignore[method-assign]
    state = {name: value.detach().cpu().numpy() for name, value in pipe.state_dict().items()}
    pipe.close()
    return losses, state, through_host[-1]


@pytest.mark.rotates(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_that_were_no_neighbours_become_some(name: str) -> None:
    """Between processes: their communicators are made when the layers move, and what they carry goes from device to
    device like all else; equal to the run without moves, to the bit."""
    found = on_ranks(moving, 4, name, "emu", timeout=120)
    assert not any(isinstance(each, str) for each in found), found
    expected, state, _ = moving(0, name, "cpu", False, 4)
    for losses, mine, through_host in found:
        assert losses == expected
        for key, value in mine.items():
            if "replicas" not in CASES[name][1] or "running" not in key:  # each has statistics of its own
                assert (value == state[key]).all(), key
        assert through_host == 0
