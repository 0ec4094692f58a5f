"""The device of a rank: where its layers live, and what must be ordered when work is only *enqueued* there.

The CPU has done what it was asked when a call returns. An accelerator has not: the host runs ahead, each stream works
through its own queue, and three things must be said that the CPU never asks for. Only ``torch.accelerator``,
``torch.Stream`` and ``torch.Event`` say them: no vendor is named (but in ``priority_cuda``, for Orion).

    order    a stream waits for an event of another before it reads what that one writes
    life     memory that another stream reads belongs to it too (``record_stream``) until that stream is there
    reading  a number that the host wants is a wait for everything before it: numbers are gathered and read once
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.runtime.ranks import device_groups

HOST = torch.device("cpu")
Key = TypeVar("Key")
Number = float | Tensor
"""A float, or a float that is still on a device."""


DEVICES = "VPIPE_DEVICES"
"""The variable by which a launcher tells the ranks of a machine their devices: an index for every local rank."""


def chosen(
    wanted: str, num_ranks: int, local_rank: int | None = None, listed: Sequence[int] | None = None
) -> list[torch.device]:
    """The device of every rank of this process: of all ``num_ranks`` here, or of the one with this ``local_rank``.

    "auto" is the accelerator where there is one, else the CPU. A type ("cuda") gives every rank of a machine a device
    of its own, or the one that is ``listed`` for it; a device with its index ("cuda:0") is shared by all.
    """
    device = _parsed(wanted)
    ranks = range(num_ranks) if local_rank is None else [local_rank]
    if is_host(device) or _has_index(device):
        return [device for _ in ranks]
    if listed is not None and len(listed) <= max(ranks):
        raise UserError(f"{DEVICES} lists {len(listed)} devices, but this machine has {max(ranks) + 1} ranks")
    offered = torch.accelerator.device_count()
    places = [rank if listed is None else listed[rank] for rank in ranks]
    if max(places) >= offered:
        raise UserError(
            f"this machine has {offered} of the device {device.type}, but its ranks are {max(ranks) + 1}; "
            f"start {offered} a machine, or let them share one by device {device.type}:0"
            if listed is None
            else f"rank {places.index(max(places))} of this machine shall compute on {device.type}:{max(places)}, but "
            f"there are {offered}, counted from 0; see launch.machines"
        )
    return [torch.device(device.type, place) for place in places]


def _parsed(wanted: str) -> torch.device:
    offered = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if wanted == "auto":
        return torch.device(offered.type) if offered is not None else HOST
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UserError(f"torch knows no device {wanted!r}; give auto, cpu, or {_names(offered)}") from None
    if device.type == "cpu":
        return HOST
    if offered is None or device.type != offered.type:
        raise UserError(f"the device {wanted!r} is not on this machine; give auto, cpu, or {_names(offered)}")
    if _has_index(device) and device.index >= torch.accelerator.device_count():
        raise UserError(
            f"there is no device {wanted!r}: this machine has {torch.accelerator.device_count()}, counted from 0"
        )
    return device


def _has_index(device: torch.device) -> bool:
    index: int | None = device.index  # torch's stubs know no device without one
    return index is not None


def _names(offered: torch.device | None) -> str:
    return offered.type if offered is not None else to_have_one()


def to_have_one() -> str:
    """What to do where torch finds no accelerator: a build for CUDA is no remedy where it is there already."""
    built = torch.version.cuda
    if built is None:
        return "install a build of torch for your accelerator"
    return f"see why this torch, which is built for CUDA {built}, finds no GPU: 'nvidia-smi' must list one"


def num_devices() -> int:
    """The accelerators of this machine that torch offers."""
    return torch.accelerator.device_count()


def device_type(wanted: str) -> str:
    """What autocast calls the device."""
    return _parsed(wanted).type


def is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def place(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a layer to its device; built on the host, it has the weights that it would have there."""
    return module if is_host(device) else module.to(device)


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """This thread works on ``device``."""
    if is_host(device):
        yield
        return
    with torch.accelerator.device_index(_index(device)):
        yield


def compute_stream(device: torch.device) -> torch.Stream:
    """The stream that this thread's operators are enqueued on."""
    return torch.accelerator.current_stream(device)


@cache
def side_stream(device: torch.device, purpose: str) -> torch.Stream:
    """The stream beside a device's compute stream that serves a purpose, for the life of the process: torch has 32 of a
    device and hands them out in turn, also to NCCL, whose receives would stand before what comes later on theirs."""
    return torch.Stream(device)


def _index(device: torch.device) -> int:
    assert _has_index(device), "a rank's device has an index"
    return device.index


def number(value: Tensor) -> Number:
    """A scalar as a float; on a device it stays there, in the same precision."""
    return float(value) if is_host(value.device) else value.detach().double()


def read(numbers: MutableMapping[Key, Number], *tensors: Tensor) -> list[Tensor]:
    """Wait for the device once: ``numbers`` become floats where they are, ``tensors`` come back in main memory."""
    waiting = [(key, value) for key, value in numbers.items() if isinstance(value, Tensor)]
    there = [tensor for tensor in tensors if not is_host(tensor.device)]
    if not waiting and not there:
        return list(tensors)
    parts = [value.reshape(1) for _, value in waiting] + [tensor.double().flatten() for tensor in there]
    block = torch.cat(parts).cpu()
    device_groups.check()
    for (key, _), value in zip(waiting, block[: len(waiting)].tolist(), strict=True):
        numbers[key] = value
    found = iter(torch.split(block[len(waiting) :], [tensor.numel() for tensor in there]))
    return [tensor if is_host(tensor.device) else next(found).to(tensor.dtype).view_as(tensor) for tensor in tensors]


def floats(numbers: Mapping[Key, Number]) -> dict[Key, float]:
    """Numbers that have been read."""
    assert not any(isinstance(value, Tensor) for value in numbers.values()), "numbers are read before they are used"
    return {key: float(value) for key, value in numbers.items()}


def scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor, without a copy that the host would wait for."""
    found = torch.tensor(value, dtype=dtype)
    return found if is_host(device) else torch.full((), found.item(), dtype=dtype, device=device)


def beside(number: Tensor, tensor: Tensor) -> Tensor:
    """A scalar where a tensor is."""
    return number if number.device == tensor.device else scalar(float(number), number.dtype, tensor.device)


def share(tensors: Sequence[Tensor], stream: torch.Stream) -> None:
    """``stream`` reads the tensors too: their memory is not given to others before it has."""
    for tensor in tensors:
        if not is_host(tensor.device):
            tensor.record_stream(stream)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of a value."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def take_peak(device: torch.device) -> int | None:
    """The most bytes that a device's allocator has given out since the last call; ``None`` on the host, or where a
    device's allocator does not say."""
    if is_host(device):
        return None
    try:
        peak = torch.accelerator.max_memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
    except (RuntimeError, NotImplementedError):
        return None
    return int(peak)


def own_memory(device: torch.device) -> int | None:
    """The bytes of a device; ``None`` on the host, or where torch cannot tell."""
    if is_host(device):
        return None
    try:
        return int(torch.accelerator.get_memory_info(device)[1])
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
