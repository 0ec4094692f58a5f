"""Ranks as processes on emulated devices, over the backend with NCCL's order: equal to the CPU to the bit."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from device_cases import CARRIED, SCHEDULES, TIED, Waiting, plain, trained, wide
from emulated_ranks import on_ranks
from torch import nn

from vpipe import Pipeline
from vpipe.errors import UserError
from vpipe.schedule import catalog

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
    ("interleaved", {"replicas": 2}),
]
OF_MODE = {"as-is": [0, 1, 5, 6, 7], "lazy": [0, 2, 3, 8], "delays": [1, 4, 8], "harsh": [0, 1, 2, 4, 5, 6]}
"""Mode → its cases: processes are dear."""
STEPS = 2
"""The first goes through main memory, the second from device to device."""


def run(rank: int, mode: str) -> list[Any]:
    import emulated_device as emulated

    from vpipe.runtime.transport.device import DeviceTransport

    sent: list[int] = []
    transfer = DeviceTransport._transfer

    def counted(self: Any, call: Any, memory: Any, *args: Any) -> Any:
        sent.append(len(memory))
        return transfer(self, call, memory, *args)

    DeviceTransport._transfer = counted  # type: ignore[method-assign]
    emulated.settings(**emulated.MODES[mode])
    found = []
    for schedule, options in [CASES[number] for number in OF_MODE[mode]]:
        sent.clear()
        outcome = trained(plain(), "emu", schedule, steps=STEPS, **options)
        found.append((outcome.losses, {n: v.numpy() for n, v in outcome.state.items()}, sum(sent)))
    return found


@pytest.mark.rotates(1)
@pytest.mark.parametrize("mode", OF_MODE)
def test_processes_equal_the_cpu(mode: str) -> None:
    ranks = on_ranks(run, 4, mode, timeout=120)
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


def behave(device: str, mode: str, **settings: float) -> None:
    if device == "emu":
        import emulated_device as emulated

        emulated.settings(**emulated.MODES[mode], **settings)


def several(rank: int, device: str, schedule: str, num_ranks: int, carried: str, mode: str = "as-is") -> list[float]:
    behave(device, mode)
    layers = wide(num_ranks * catalog.get(schedule).stages_per_rank, carried)
    ranks = {"num_ranks": num_ranks} if device == "cpu" else {"timeout": 60}
    return trained(layers, device, schedule, optimizer="sgd", num_microbatches=2 * num_ranks, **ranks).losses


@pytest.mark.rotates(6)
@pytest.mark.parametrize("mode", ["as-is", "harsh"])
@pytest.mark.parametrize("carried", CARRIED)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_of_several_tensors(schedule: str, num_ranks: int, carried: str, mode: str) -> None:
    """Whatever a message carries, no communicator is made for it while a program runs: its host would wait there."""
    found = on_ranks(several, num_ranks, "emu", schedule, num_ranks, carried, mode, timeout=60)
    assert found == [several(0, "cpu", schedule, num_ranks, carried)] * num_ranks


def waiting(rank: int, device: str, schedule: str, num_ranks: int, launches: bool, mode: str = "as-is") -> list[float]:
    behave(device, mode, **{"async": not launches})
    blocks = plain(num_ranks * catalog.get(schedule).stages_per_rank)
    layers = blocks if launches else [Waiting(block) for block in blocks]
    ranks = {"num_ranks": num_ranks} if device == "cpu" else {"timeout": 40}
    return trained(layers, device, schedule, num_microbatches=2 * num_ranks, **ranks).losses


@pytest.mark.rotates(6)
@pytest.mark.parametrize("mode", ["as-is", "harsh"])
@pytest.mark.parametrize("launches", [False, True], ids=["layers", "launches"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_device_may_wait_as_a_whole(schedule: str, num_ranks: int, launches: bool, mode: str) -> None:
    """A layer that synchronizes, or every launch (CUDA_LAUNCH_BLOCKING): no receive is posted before work of its own
    rank that its sender needs."""
    found = on_ranks(waiting, num_ranks, "emu", schedule, num_ranks, launches, mode, timeout=40)
    assert found == [waiting(0, "cpu", schedule, num_ranks, launches)] * num_ranks


def launched(rank: int, device_messages: bool) -> str:
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    try:
        Pipeline(wide(3, "skip"), nn.functional.mse_loss, device="emu", device_messages=device_messages)
    except UserError as error:
        return str(error)
    return ""


def test_launches_that_wait_and_a_skip_are_refused() -> None:
    """What skips a stage is sent long before it is received."""
    assert on_ranks(launched, 3, False) == [""] * 3
    for said in on_ranks(launched, 3, True):
        assert "CUDA_LAUNCH_BLOCKING=1 makes a rank wait" in said
        assert "stage 2 receives what stage 0 sends past others" in said


ROWS = (16, 16, 32, 16, 30, 32)
"""Rows of the batches of some steps, in four units; those of 30 are units of different sizes and shares."""


def changing_shapes(rank: int, device: str, num_ranks: int | None = None) -> Any:
    from device_cases import OPTIMIZERS, batches, with_skip

    from vpipe.runtime.transport.linked import LinkedTransport

    told: list[list[int]] = []
    send = LinkedTransport.send

    def counted(self: Any, envelope: Any, *args: Any) -> None:
        told[-1][envelope.step >= 0 and envelope.source >= 0] += 1
        send(self, envelope, *args)

    LinkedTransport.send = counted  # type: ignore[method-assign]
    told.append([0, 0])
    pipe = Pipeline(
        with_skip(), nn.functional.mse_loss, num_microbatches=4, device=device, optimizer=OPTIMIZERS["sgd"],
        num_ranks=num_ranks, timeout=120,
    )  # fmt: skip
    losses = []
    for rows in ROWS:
        told.append([0, 0])
        losses.append(pipe.train_step(*batches(1, rows)[0]))
    told.append([0, 0])
    losses.append(pipe.evaluate(*batches(1, 20)[0]))
    if 0 in pipe.modules():
        pipe.modules()[0].requires_grad_(False)  # what stage 0 sends no longer needs a gradient
    losses += [pipe.train_step(*batches(1, 16)[0]) for _ in range(2)]
    pipe.close()
    LinkedTransport.send = send  # type: ignore[method-assign]
    return losses, [step[1] for step in told[1:-1]]


def test_messages_may_change_their_form() -> None:
    """Shapes are told when they change and not otherwise; a skip between ranks that also share a chain has a
    communicator of its own; a unit's share, a number of the host, travels beside its tensors."""
    found = on_ranks(changing_shapes, 2, "emu", timeout=120)
    expected, _ = changing_shapes(0, "cpu", 2)
    assert [losses for losses, _ in found] == [expected, expected]
    for _, told in found:
        assert [number > 0 for number in told] == [True, False, True, False, True, False]


def waits_inside(rank: int) -> list[dict[str, int]]:
    """What the hosts waited for in the loops of the third step."""
    import emulated_device as emulated
    from device_cases import OPTIMIZERS, batches, with_skip

    from vpipe.runtime.engine import Engine

    inside: list[dict[str, int]] = []
    enqueue = Engine._enqueue

    def counted(self: Any, *args: Any) -> None:
        emulated.native.reset_counts()
        enqueue(self, *args)
        inside.append(emulated.syncs())

    Engine._enqueue = counted  # type: ignore[method-assign]
    found = []
    for schedule, more in (("1f1b", {"clip_norm": 0.1}), ("zb-v", {"recompute": 0.5}), ("pipedream", {})):
        optimizer = OPTIMIZERS["adamw"]
        pipe = Pipeline(
            with_skip(), nn.functional.mse_loss, schedule=schedule, num_microbatches=4, device="emu",
            optimizer=optimizer, timeout=120, **more,
        )  # fmt: skip
        for _ in range(3):
            pipe.train_step(*batches(1, 32)[0])
        pipe.close()
        found.append(inside[-1])
    return found


def test_the_loop_of_a_process_never_waits() -> None:
    assert on_ranks(waits_inside, 2, timeout=120) == [[{}, {}, {}]] * 2
