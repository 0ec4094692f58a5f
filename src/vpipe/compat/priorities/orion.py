"""Priorities by Orion, a library that is preloaded into the process and orders the kernels of its *clients*.

    LD_PRELOAD=liborion.so      the library stands between torch and CUDA
    client 0                    high priority; 1, 2, ... are best effort; -1 is not managed
    a thread says who it is     orion_set_client_idx, thread-local: the backward must run on the same thread

A run that asks for Orion gets it or an error: a library that is missing, not preloaded, incomplete or that refuses to
start is never replaced by a silent nothing. What it does to the speed of a GPU was not measured by us.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from vpipe.compat.priorities.order import Policy, critical_path, fifo, first_hp, none
from vpipe.errors import UserError
from vpipe.schedule.action import Action, Kind

MAX_CLIENTS = 16
UNMANAGED = -1
REMEDY = (
    "give the launcher ORION_LIBRARY=/path/to/liborion.so, which preloads it into the ranks, or start with "
    "LD_PRELOAD=/path/to/liborion.so, or set parallel.use_orion_scheduler: false"
)

_INT, _NOTHING = ctypes.c_int, None
_SYMBOLS: dict[str, tuple[type[ctypes.c_int] | None, list[type[ctypes.c_int]]]] = {
    "orion_start_scheduler": (_INT, [_INT, _INT]),
    "orion_stop_scheduler": (_NOTHING, []),
    "orion_set_client_idx": (_NOTHING, [_INT]),
    "orion_get_client_idx": (_INT, []),
    "orion_sync_client_stream": (_NOTHING, [_INT]),
    "orion_set_sm_threshold": (_NOTHING, [_INT]),
    "orion_get_sm_threshold": (_INT, []),
    "orion_reset_state": (_NOTHING, []),
}
"""The C interface: name → (result, arguments)."""


def preload(environ: Mapping[str, str]) -> dict[str, str]:
    """What the environment of ranks needs that use Orion: ``ORION_LIBRARY`` goes into the ranks' LD_PRELOAD, and only
    there."""
    library = environ.get("ORION_LIBRARY")
    if not library:
        return {}
    if not Path(library).is_file():
        raise UserError(f"ORION_LIBRARY is {library!r}, where there is no file; give the path of liborion.so")
    if any(letter in library for letter in " :"):
        raise UserError(f"ORION_LIBRARY is {library!r}; LD_PRELOAD takes no path with a space or a colon")
    others = environ.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{Path(library).resolve()}{':' if others else ''}{others}"}


def is_preloaded() -> bool:
    """Whether the library is in this process: not merely on the disk."""
    return hasattr(ctypes.CDLL(None), "orion_set_client_idx")


class Orion:
    """The preloaded library, with its functions typed and its answers checked."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        if not is_preloaded():
            raise UserError(f"Orion is asked for, but its library is not preloaded into this process; {REMEDY}")
        missing = [name for name in _SYMBOLS if not hasattr(self._library, name)]
        if missing:
            raise UserError(f"the preloaded Orion library lacks {', '.join(missing)}; build a version that has them")
        for name, (result, arguments) in _SYMBOLS.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        self.num_clients = 0
        """Clients of the running scheduler; 0 where none runs."""

    def start(self, num_clients: int, device: int) -> None:
        """Start the scheduler's thread for one device."""
        if not 1 <= num_clients <= MAX_CLIENTS:
            raise UserError(
                f"Orion schedules 1 to {MAX_CLIENTS} clients, not {num_clients}; lower training.num_microbatches, or "
                "choose priority first-hp or critical-path, which share clients"
            )
        if self.num_clients:
            raise UserError(f"Orion is already running with {self.num_clients} clients; stop it first")
        code = self._library.orion_start_scheduler(num_clients, device)
        if code != 0:
            raise UserError(
                f"Orion refused to start for {num_clients} clients on device {device}: orion_start_scheduler returned "
                f"{code}; see the library's own messages above"
            )
        self.num_clients = num_clients

    def stop(self) -> None:
        """Stop the scheduler; harmless where none runs."""
        if self.num_clients:
            self._library.orion_stop_scheduler()
            self.num_clients = 0

    def set_client(self, client: int) -> None:
        """Say who this thread is; ``UNMANAGED`` leaves it to CUDA."""
        if not UNMANAGED <= client < max(self.num_clients, 0):
            raise UserError(f"Orion has clients 0..{self.num_clients - 1}, not {client}; start it with more of them")
        self._library.orion_set_client_idx(client)

    def client(self) -> int:
        """Who this thread is."""
        return int(self._library.orion_get_client_idx())

    def sync(self, client: int) -> None:
        """Wait until all that ``client`` has queued is done."""
        self._library.orion_sync_client_stream(client)


class OrionClients:
    """A policy as Orion's clients. Orion knows one high priority, so ``none`` means first-hp, as in OurGPipe."""

    def __init__(self, policy: Policy, num_microbatches: int, device: int = 0, orion: Orion | None = None) -> None:
        self._policy = first_hp if policy is none else policy
        self._orion = orion or Orion()
        self.num_clients = num_clients(self._policy, num_microbatches)
        self._orion.start(self.num_clients, device)

    @contextmanager
    def turn(self, action: Action) -> Iterator[None]:
        """The body's kernels belong to the action's client, those of its backward too."""
        from torch.autograd.grad_mode import set_multithreading_enabled

        before = self._orion.client()
        self._orion.set_client(client_of(self._policy, action, self.num_clients))
        try:
            with set_multithreading_enabled(False):  # autograd's own threads are no clients of Orion
                yield
        finally:
            self._orion.set_client(before)

    def close(self) -> None:
        """Wait for all clients and stop the scheduler."""
        for client in range(self._orion.num_clients):
            self._orion.sync(client)
        self._orion.stop()


def num_clients(policy: Policy, num_microbatches: int) -> int:
    """How many clients a policy needs. ``fifo`` needs one per microbatch; the others can share."""
    if policy is critical_path:
        return 3
    return num_microbatches if policy is fifo else min(num_microbatches, MAX_CLIENTS)


def client_of(policy: Policy, action: Action, num_clients: int) -> int:
    """The client of an action: 0 is the high-priority one, and what belongs to no microbatch is not managed."""
    if policy is critical_path:
        return {Kind.F: 1, Kind.W: 2}.get(action.kind, 0)
    if action.microbatch <= 0 or num_clients == 1:
        return min(action.microbatch, 0)
    return 1 + (action.microbatch - 1) % (num_clients - 1)
