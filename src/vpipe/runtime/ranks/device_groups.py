"""Ending the communicators between devices from outside, so that nobody waits for a rank that is gone.

A device's backend (NCCL) runs transfers on streams. One whose other end is gone never ends, the streams behind it wait,
and whoever reads a number of the device waits with them: no socket can be shut and no signal comes through. So the
groups of devices are remembered here, and ``abort`` ends their communicators; what was behind them then runs to its
end, on numbers that mean nothing, and is thrown away with the step.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import torch

_TRIES = 8
"""Communicators that fail one after the other each leave an error on their device."""
_lock = threading.Lock()
_made: list[tuple[Any, torch.device]] = []


def remember(group: Any, device: torch.device) -> None:
    """A group of this process whose members' tensors are on devices."""
    with _lock:
        _made.append((group, device))


def abort() -> None:
    """End all of them. Any thread may call this, and more than once."""
    with _lock:
        groups = [group for group, _ in _made]
        backend: Any = groups[0]._get_backend(_made[0][1]) if groups else None
    together = hasattr(backend, "_group_start")  # NCCL's communicators, ended one by one, may wait for each other
    if together:
        backend._group_start()
    for group in groups:
        with suppress(RuntimeError):
            group.abort()
    if together:
        backend._group_end()


def forget() -> None:
    """After ``abort``, by the thread that trains: let the devices come to the end of what they were given."""
    with _lock:
        devices = dict.fromkeys(device for _, device in _made)
        _made.clear()
    for device in devices:
        for _ in range(_TRIES):
            with suppress(RuntimeError):
                torch.accelerator.synchronize(device)
                break
