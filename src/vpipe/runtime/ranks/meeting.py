"""Where ranks meet: a store (``vpipe.store``) that only they can reach.

``vpipe run`` keeps it itself, so it outlives every rank; elsewhere rank 0 keeps it.

Words: docs/glossary.md.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from hmac import compare_digest, digest
from typing import Any

import torch.distributed as dist

from vpipe.door import SECRET, RefusedError, secret_of
from vpipe.errors import UserError
from vpipe.network import address_here, family_of, is_loopback
from vpipe.runtime.ranks.control import CONTROL
from vpipe.runtime.ranks.failure import PeerLost, reason
from vpipe.runtime.ranks.store import StoreClient
from vpipe.store import STORE, Store

_stores: Any = dist
"""torch's type stubs leave its stores out."""

STORE_WITHIN = 30.0
"""Seconds within which the store of an elastic run must answer: the rank that has it may be lost at any time."""
COME_WITHIN = 300.0
"""Seconds within which all ranks must have come; less if the timeout is less."""


@dataclass(frozen=True)
class LaunchedRank:
    """What a launcher says about this process."""

    rank: int
    num_ranks: int
    host: str
    port: int
    store: tuple[str, int] | None = None
    """Where the launcher keeps the store at which the ranks meet; ``None`` where rank 0 shall."""
    has_agent_store: bool = False
    """Whether torchrun keeps a store of torch's at ``host`` and ``port``."""
    generation: str = "0"
    """Counts restarts by torchrun: the addresses of ranks that are gone must not be found again."""
    report_fd: int | None = None
    secret: str = ""
    watched: bool = True
    """Whether a watchdog ends this rank with the others; in an elastic run the launcher decides."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> LaunchedRank:
        try:
            report = environ.get("VPIPE_REPORT_FD")
            return cls(
                int(environ["RANK"]),
                int(environ["WORLD_SIZE"]),
                environ["MASTER_ADDR"],
                int(environ["MASTER_PORT"]),
                _address(environ.get(STORE)),
                environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                f"{environ.get('TORCHELASTIC_RUN_ID', '')}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
                int(report) if report else None,
                secret_of(environ),
                CONTROL not in environ,
            )
        except (KeyError, ValueError) as error:
            raise UserError(
                f"the launcher has set WORLD_SIZE, but not what belongs to it ({error}); RANK, WORLD_SIZE, MASTER_ADDR "
                "and MASTER_PORT are needed, as torchrun and 'vpipe run' set them"
            ) from None


@dataclass(frozen=True)
class Meeting:
    """This rank's clients of the store, for the main thread and for the watchdog, with what this generation writes;
    and the store itself, where this rank keeps it."""

    store: StoreClient
    watched: StoreClient
    kept: Store | None

    @classmethod
    def at(cls, place: LaunchedRank, patience: float) -> Meeting:
        """Connect to the store. It is the launcher's; else rank 0 opens it, where all know it to be, or says where in
        a store of torch's that is there already, which any process can read and stop: its value is sealed."""
        address, kept, torchs = place.store or (place.host, place.port), None, None
        keeps = place.rank == 0 and place.store is None
        with ExitStack() as failing:
            try:
                if place.store is None:
                    torchs = _torchs_store(place, patience)
                if keeps:
                    kept = _kept(place, torchs is not None)
                    failing.callback(kept.stop)
                    address = place.host, kept.port
                if torchs is not None:
                    address = _told(torchs, place, (address_here(os.environ), address[1]) if keeps else None)
                store, watched = (
                    StoreClient(address, place.secret, patience, f"{place.generation}/") for _ in range(2)
                )
            except (RuntimeError, OSError) as error:
                raise _failure(error, f"{address[0]}:{address[1]}", keeps, patience) from None
            failing.pop_all()
        return cls(store, watched, kept)


def _failure(error: Exception, where: str, keeps: bool, patience: float) -> Exception:
    """What to say of an error of ``Meeting.at``."""
    if isinstance(error, RefusedError):
        return UserError(
            f"who listens at {where} does not know the secret of this run: set {SECRET} to one word of yours for all "
            "ranks, where their machines share no home; or choose another MASTER_PORT, where that is another program"
        )
    if keeps:
        return UserError(f"rank 0 cannot open the store at {where} ({reason(error)}); choose another MASTER_PORT")
    return PeerLost(f"rank 0 has not opened the store at {where} within {patience:g} s ({reason(error)})", 0)


def _kept(place: LaunchedRank, anywhere: bool) -> Store:
    """The store of rank 0: at the port that it was told, or at any port of the address that gloo takes too.
    Of all addresses of this machine, because others may know it by any of them."""
    host, port = (address_here(os.environ), 0) if anywhere else (place.host, place.port)
    if anywhere or is_loopback(host):
        listener = socket.create_server((host, port), family=family_of(host), backlog=1024)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    else:
        listener = socket.create_server(("", port), backlog=1024)
    store = Store(listener, place.secret)
    threading.Thread(target=store.serve, name="vpipe-store", daemon=True).start()
    return store


def _torchs_store(place: LaunchedRank, patience: float) -> Any:
    """A store of torch's that all ranks have already: of a process group of the user's own, or torchrun's."""
    if dist.is_initialized():
        return _stores.distributed_c10d._get_default_store()
    if not place.has_agent_store:
        return None
    within = timedelta(seconds=patience)
    return _stores.TCPStore(place.host, place.port, None, False, within, wait_for_workers=False, multi_tenant=True)


def _told(torchs: Any, place: LaunchedRank, mine: tuple[str, int] | None) -> tuple[str, int]:
    """The address that rank 0 has said in a store of torch's."""
    key = f"vpipe/{place.generation}/store"
    if mine is not None:
        text = json.dumps(mine)
        torchs.set(key, _seal(place, text) + text)
        return mine
    said = bytes(torchs.get(key)).decode(errors="replace")
    seal, text = said[:64], said[64:]
    if not compare_digest(seal.encode(), _seal(place, text).encode()):
        raise RefusedError
    host, port = json.loads(text)
    return str(host), int(port)


def _address(text: str | None) -> tuple[str, int] | None:
    """An address that the environment tells."""
    host, _, port = (text or "").rpartition(":")
    return (host, int(port)) if port else None


def _seal(place: LaunchedRank, text: str) -> str:
    return digest(place.secret.encode(), f"{place.generation} {text}".encode(), "sha256").hex()
