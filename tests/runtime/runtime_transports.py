"""The promises of ``transport_suite`` on ranks of this process and of process groups, with pickle forbidden."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transport_suite import (
    changed_afterwards,
    check_same,
    collectives,
    exchange,
    kinds,
    many_channels,
    order,
    sizes,
    wrong_message,
)

from vpipe.runtime.assembly import between_processes
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.transport.inprocess import Hub

__all__ = [
    "changed_afterwards", "check_same", "collectives", "exchange", "forbidden_pickle", "in_process_group", "in_threads",
    "kinds", "many_channels", "order", "sizes", "wrong_message",
]  # fmt: skip


@contextmanager
def forbidden_pickle() -> Iterator[None]:
    """Nothing is pickled while a transport is at work."""

    def refuse(*arguments: Any, **more: Any) -> None:
        raise AssertionError("a message was pickled")

    kept = {name: getattr(pickle, name) for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler")}
    for name in kept:
        setattr(pickle, name, refuse)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(pickle, name, value)


def in_threads(scenario: Callable[..., Any], *arguments: Any, blocking: bool = False) -> list[Any]:
    """The scenario on two ranks of this process."""
    found: dict[int, Any] = {}

    def run(transport: Transport) -> None:
        try:
            found[transport.rank] = scenario(transport, *arguments)
        except BaseException as error:
            transport.fail(error)
            found[transport.rank] = error

    threads = [threading.Thread(target=run, args=(transport,)) for transport in Hub(2, blocking).transports()]
    with forbidden_pickle():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    for value in found.values():
        if isinstance(value, BaseException):
            raise value
    return [found[rank] for rank in sorted(found)]


def in_process_group(kind: str, scenario: Callable[..., Any], *arguments: Any) -> Any:
    """The scenario on one rank of a process group."""
    over_gloo = kind == "gloo"
    transport = between_processes("distributed" if over_gloo else kind, blocking=False, timeout=60, threads=over_gloo)
    try:
        with forbidden_pickle():
            return scenario(transport, *arguments)
    finally:
        transport.barrier()
        transport.close()
