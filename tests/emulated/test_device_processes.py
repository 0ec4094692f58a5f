"""Ranks as processes on emulated devices, over the backend with NCCL's order: equal to the CPU to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_cases import TIED, plain, trained
from emulated_ranks import on_ranks

pytestmark = pytest.mark.slow

CASES: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {"recompute": 0.5, "clip_norm": 0.3}),
    ("zb-v", {}),
    ("interleaved", {"optimizer": "fused"}),
    ("dualpipe-v", {"optimizer": "sgd"}),
    ("pipedream", {"optimizer": "fused"}),
    ("1f1b", {"replicas": 2}),
    ("zb-h1", {"tied": TIED}),
    ("gpipe", {"device_messages": False}),
]
OF_MODE = {"as-is": [0, 1, 5, 6, 7], "lazy": [0, 2, 3], "delays": [1, 4]}
"""Mode → its cases: processes are dear."""
STEPS = 3
"""The first goes through main memory, the others from device to device."""


def run(rank: int, mode: str) -> list[Any]:
    import emulated_device as emulated
    import torch.distributed as dist

    sent: list[int] = []
    isend = dist.isend

    def counted(tensor: Any, *args: Any, **more: Any) -> Any:
        sent.append(tensor.device.type == "emu")
        return isend(tensor, *args, **more)

    dist.isend = counted
    emulated.settings(**emulated.MODES[mode])
    found = []
    for schedule, options in [CASES[number] for number in OF_MODE[mode]]:
        sent.clear()
        outcome = trained(plain(), "emu", schedule, steps=STEPS, **options)
        found.append((outcome.losses, {n: v.numpy() for n, v in outcome.state.items()}, sum(sent)))
    return found


@pytest.mark.parametrize("mode", ["as-is", "lazy", "delays"])
def test_processes_equal_the_cpu(mode: str) -> None:
    ranks = on_ranks(run, 4, mode, timeout=40)
    assert not any(isinstance(found, str) for found in ranks), ranks
    for place, number in enumerate(OF_MODE[mode]):
        schedule, options = CASES[number]
        options = {key: value for key, value in options.items() if key != "device_messages"}
        expected = trained(plain(), "cpu", schedule, steps=STEPS, num_ranks=4, **options)
        for found in ranks:
            losses, state, num_sent = found[place]
            assert losses == expected.losses, schedule
            if "replicas" in options:  # each has statistics of its own
                state = {name: value for name, value in state.items() if "running" not in name}
            assert all(torch.equal(torch.from_numpy(v), expected.state[n]) for n, v in state.items()), schedule
            assert (num_sent > 0) is (CASES[number][1].get("device_messages", True)), schedule


def another_shape(rank: int) -> None:
    from device_cases import OPTIMIZERS, batches
    from torch import nn

    from vpipe import Pipeline

    pipe = Pipeline(
        plain(4), nn.functional.mse_loss, num_microbatches=4, device="emu", optimizer=OPTIMIZERS["sgd"], timeout=3
    )
    for rows in (16, 16, 32):
        pipe.train_step(*batches(1, rows)[0])


def test_a_message_of_another_form_is_refused_in_words() -> None:
    found = on_ranks(another_shape, 2, timeout=8)
    assert "messages between devices keep their form: give batches of one shape" in found[0]
    assert "float32[8, 16]" in found[0]
    assert "float32[4, 16] in the program's first step" in found[0]


def mutated(rank: int, how: str) -> list[float]:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    real = dist.isend
    if how == "no wait":
        dist.irecv = lambda *args, **more: _Unawaited(distributed_c10d.irecv(*args, **more))  # type: ignore[assignment]
    if how == "swapped":
        held: list[Any] = []

        def swapping(tensor: Any, target: int, group: Any = None, **more: Any) -> Any:
            if tensor.device.type != "emu" or rank or len(held) > 1:
                return real(tensor, target, group=group, **more)
            held.append((tensor, target, group))
            if len(held) == 1:
                return _Unawaited(None)
            second, first = (real(tensor, target, group=group) for tensor, target, group in reversed(held))
            return first or second

        dist.isend = swapping  # type: ignore[assignment]
    return trained(plain(4), "emu", "gpipe", steps=2, num_microbatches=4, timeout=5).losses


class _Unawaited:
    """A transfer that nobody waits for."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return False


def test_messages_without_their_wait_or_their_order_are_wrong() -> None:
    expected = trained(plain(4), "cpu", "gpipe", steps=2, num_microbatches=4, num_ranks=2).losses
    found = {how: on_ranks(mutated, 2, how, timeout=8) for how in ("right", "no wait", "swapped")}
    assert found["right"] == [expected, expected]
    assert found["no wait"] != [expected, expected]
    assert found["swapped"] != [expected, expected]
