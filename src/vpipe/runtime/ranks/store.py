"""A rank's end of the store at which the ranks meet, as torch's process groups use it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vpipe.door import Letters, dial
from vpipe.store import PURPOSE

_stores: Any = dist
"""torch's type stubs leave its stores out."""
_SLACK = 30.0
"""Seconds beyond those in which the store says itself that something did not come."""


class StoreClient(_stores.Store):  # type: ignore[misc]
    """A connection to the store; all names begin with ``prefix``. Threads take turns, so that one of them that waits
    keeps the others waiting. torch's groups keep no reference to a store in Python: its maker must."""

    def __init__(self, address: tuple[str, int], secret: str, patience: float, prefix: str) -> None:
        super().__init__()
        self._prefix, self._dialled = prefix, (address, secret, patience)
        self.set_timeout(timedelta(seconds=patience))
        guest = dial(address, secret, PURPOSE, patience)
        guest.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._letters = Letters(guest, host=False)
        self._lock = threading.Lock()

    def clone(self) -> StoreClient:
        """A connection of its own for another thread: a device's backend (NCCL) asks for one."""
        address, secret, patience = self._dialled
        return StoreClient(address, secret, patience, self._prefix)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", self._prefix + key, _text(value))

    def get(self, key: str) -> bytes:
        return self._wait([key], self.timeout)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, timeout or self.timeout)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait(keys, self.timeout)

    def has_extended_api(self) -> bool:
        """gloo asks for many values at once."""
        return True

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", [self._prefix + key for key in keys]))

    def add(self, key: str, number: int) -> int:
        return int(self._ask("add", self._prefix + key, number))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        found = self._ask("compare_set", self._prefix + key, _text(expected), _text(value))
        return str(found).encode("latin-1")

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", self._prefix + key))

    def _wait(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        within = timeout.total_seconds()
        values = self._ask("wait", [self._prefix + key for key in keys], within, within=within)
        if values is None:
            raise dist.DistStoreError(f"{', '.join(keys)} did not come within {within:g} s")
        return [value.encode("latin-1") for value in values]

    def _ask(self, *request: Any, within: float = 0.0) -> Any:
        """The answer. A connection on which one was not waited for to the end has no use any more."""
        with self._lock:
            connection, answers = self._letters.connection, list[Any]()
            try:
                connection.settimeout(within + max(_SLACK, self.timeout.total_seconds()))
                self._letters.send(request)
                while not answers:
                    answers = self._letters.receive()
            except (OSError, EOFError) as error:
                connection.close()
                raise dist.DistNetworkError(str(error) or "it has closed the connection") from None
            except BaseException:
                connection.close()
                raise
        return answers[0]


def _text(value: str | bytes) -> str:
    return (value if isinstance(value, bytes) else value.encode()).decode("latin-1")
