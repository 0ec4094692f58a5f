"""Where ranks meet: a store whose address the launcher tells.

torchrun and ``vpipe run`` keep the store themselves, so it outlives every rank; elsewhere rank 0 keeps it.

Words: docs/glossary.md.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vpipe.errors import UserError
from vpipe.runtime.ranks.control import CONTROL
from vpipe.runtime.ranks.failure import PeerLost, reason
from vpipe.runtime.ranks.secret import SECRET, prefix

_stores: Any = dist
"""torch's type stubs leave its stores out."""

LISTENER = "VPIPE_LISTENER_FD"
"""The variable that names a socket which listens already, where this rank shall open the store."""
STORE_WITHIN = 30.0
"""Seconds within which the store of an elastic run must answer: whoever has it may be lost at any time."""
COME_WITHIN = 300.0
"""Seconds within which all ranks must have come; less if the timeout is less."""


@dataclass(frozen=True)
class LaunchedRank:
    """What a launcher says about this process."""

    rank: int
    num_ranks: int
    host: str
    port: int
    launcher_keeps_store: bool = False
    generation: str = "0"
    """Counts restarts by torchrun: the addresses of ranks that are gone must not be found again."""
    report_fd: int | None = None
    secret: str = ""
    """Of this run; empty where no launcher of ours gave one."""
    watched: bool = True
    """Whether a watchdog ends this rank with the others; in an elastic run the launcher decides."""
    listener: int | None = None
    """A socket that listens already, for the store."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> LaunchedRank:
        try:
            report = environ.get("VPIPE_REPORT_FD")
            return cls(
                int(environ["RANK"]),
                int(environ["WORLD_SIZE"]),
                environ["MASTER_ADDR"],
                int(environ["MASTER_PORT"]),
                environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                f"{environ.get('TORCHELASTIC_RUN_ID', '')}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
                int(report) if report else None,
                environ.get(SECRET, ""),
                CONTROL not in environ,
                int(environ[LISTENER]) if LISTENER in environ else None,
            )
        except (KeyError, ValueError) as error:
            raise UserError(
                f"the launcher has set WORLD_SIZE, but not what belongs to it ({error}); RANK, WORLD_SIZE, MASTER_ADDR "
                "and MASTER_PORT are needed, as torchrun and 'vpipe run' set them"
            ) from None

    def connect(self, timeout: float, keep: bool = False) -> Any:
        """A client of the store at which the ranks meet, with what this generation writes; ``keep`` also serves it."""
        listener = self.listener if keep else None
        if keep and listener is None and self._is_loopback:
            listener = socket.create_server((self.host, self.port), backlog=1024).detach()
        options: dict[str, Any] = (
            {"master_listen_fd": listener, "use_libuv": False}  # which torch 2.6 refuses otherwise
            if listener is not None
            else {}
        )
        store = _stores.TCPStore(
            self.host,
            self.port,
            None,
            keep,
            timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=not options,
            **options,
        )
        return _stores.PrefixStore(prefix(self.secret, self.generation), store)

    @property
    def _is_loopback(self) -> bool:
        return self.host == "localhost" or self.host.startswith("127.")


def connected(place: LaunchedRank, patience: float) -> tuple[Any, Any]:
    """Two clients of the store, for the main thread and for the watchdog."""
    keep = place.rank == 0 and not place.launcher_keeps_store
    try:
        return place.connect(patience, keep), place.connect(patience)
    except (RuntimeError, OSError) as error:
        where, why = f"{place.host}:{place.port}", reason(error)
        if keep:
            raise UserError(f"rank 0 cannot open the store at {where} ({why}); choose another MASTER_PORT") from None
        raise PeerLost(f"rank 0 has not opened the store at {where} within {patience:g} s ({why})", 0) from None
