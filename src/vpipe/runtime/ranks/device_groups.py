"""Ending the communicators between devices from outside, so that no rank waits for one that is gone.

A device's backend (NCCL) runs transfers on streams. One whose other end is gone never ends, the streams behind it wait,
and a host that reads a number of the device waits with them: no socket can be shut and no signal comes through. So the
groups of devices are remembered here, and ``abort`` ends their communicators. What was behind them then runs to its
end, on numbers that mean nothing: a reader of one is told so (``check``), and all of it is thrown away with the step.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from vpipe.runtime.ranks.failure import PeerLost

NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""For ranks that outlive their groups: torch's own watchdog of NCCL ends the process when a peer is gone."""
WITHIN = 30.0
"""Seconds in which a device must come to the end of what it was given, once its communicators are ended."""
_TRIES = 8
"""Communicators that fail one after the other each leave an error on their device."""


def are_outlived() -> bool:
    """Whether the ranks of this process go on when their groups are ended."""
    return NO_WATCHDOG.items() <= os.environ.items()


class DeviceLost(Exception):
    """A device does not recover from what its kernels did to numbers that meant nothing."""


class DeviceGroups:
    """The groups of one meeting of the ranks; the next meeting has its own, which is not ended by mistake."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[tuple[Any, torch.device]] = []
        self.ended = False

    def add(self, group: Any, device: torch.device) -> None:
        with self._lock:
            self._made.append((group, device))

    @property
    def any(self) -> bool:
        return bool(self._made)

    def abort(self) -> None:
        """End all of them. Any thread may call this, and more than once."""
        with self._lock:
            self.ended = True  # before any thread can read what follows
            groups = [group for group, _ in self._made]
            backend: Any = groups[0]._get_backend(self._made[0][1]) if groups else None
        together = hasattr(backend, "_group_start")  # NCCL's communicators, ended one by one, may wait for each other
        if together:
            backend._group_start()
        for group in groups:
            with suppress(RuntimeError):
                group.abort()
        if together:
            backend._group_end()

    def part(self, groups: Sequence[Any], device: torch.device, meet: Callable[[], None]) -> None:
        """End these in good order: when nothing of them is under way any more, on any rank (``meet``)."""
        with self._lock:
            if self.ended or not groups:
                return
            self._made = [(group, where) for group, where in self._made if group not in groups]
        with suppress(PeerLost):
            torch.accelerator.synchronize(device)
            meet()
            for group in groups:
                dist.destroy_process_group(group)

    def settle(self) -> None:
        """After ``abort``, by the thread that trains: let the devices come to the end of what they were given. An
        error of theirs is told once, unless it stays for good: then ``DeviceLost``."""
        with self._lock:
            devices = dict.fromkeys(device for _, device in self._made)
            self._made.clear()
        for device in devices:
            told: list[str] = []
            waiting = threading.Thread(target=_wait, args=(device, told), daemon=True)
            waiting.start()
            waiting.join(WITHIN)
            if waiting.is_alive():
                raise DeviceLost(f"{device} has not come to an end within {WITHIN:g} s after a rank was lost")
            if len(told) == _TRIES:
                raise DeviceLost(f"{device} fails again and again after a rank was lost ({told[-1]})")


def _wait(device: torch.device, told: list[str]) -> None:
    """Wait for all of a device; what it says meanwhile is added to ``told``."""
    for _ in range(_TRIES):
        try:
            torch.accelerator.synchronize(device)
            return
        except Exception as error:  # whatever a kernel says of numbers that mean nothing
            told.append(str(error).partition("\n")[0])


_current = DeviceGroups()


def current() -> DeviceGroups:
    """Those of the ranks that this process is with now."""
    return _current


def remember(group: Any, device: torch.device) -> None:
    """A group of this process whose members' tensors are on devices."""
    _current.add(group, device)


def check() -> None:
    """Called when the host has read numbers of a device: they mean nothing if its communicators were ended before."""
    if _current.ended:
        raise PeerLost("the communicators between the devices were ended: a rank is gone")


def forget() -> None:
    """This process leaves the others: nothing of their step is under way on its device any more."""
    global _current
    _current.settle()
    _current = DeviceGroups()
