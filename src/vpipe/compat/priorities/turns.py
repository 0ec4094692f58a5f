"""Whose turn it is on a device that engines or threads share: the guard around what an engine computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from time import perf_counter_ns
from typing import Any

from vpipe.compat.priorities.order import Backend, Turnstile, policy
from vpipe.compat.priorities.orion import OrionClients
from vpipe.runtime.engine import Engine


class Turns:
    """The guard of an engine: a thread computes when it is the turn of its action."""

    def __init__(self, engine: Engine, backend: Backend, inner: AbstractContextManager[Any] | None) -> None:
        self._engine, self._backend, self._inner = engine, backend, inner
        self._mine = threading.local()

    def __enter__(self) -> None:
        action = self._engine.current
        assert action is not None, "an engine computes only actions of its program"
        with ExitStack() as stack:
            stack.enter_context(self._backend.turn(action))
            if self._inner is not None:
                stack.enter_context(self._inner)
            self._mine.held = stack.pop_all()
        self._engine._ready = perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self._mine.held.close()


def take_turns(
    each_engine: Callable[[Callable[[Engine], None]], None], priority: str, *, use_orion: bool, num_microbatches: int
) -> Backend | None:
    """Let the engines of this process take turns by ``parallel.priority``; ``None`` where there is no order to keep.

    A turnstile lets one in at a time, as the engines' own lock does, and takes its place. Orion orders what the device
    does, not who may call it, so there the lock stays.
    """
    if priority == "none" and not use_orion:
        return None
    chosen = policy(priority)
    backend: Backend = OrionClients(chosen, num_microbatches) if use_orion else Turnstile(chosen)

    def guard(engine: Engine) -> None:
        engine._guard = Turns(engine, backend, engine._guard if use_orion else None)

    each_engine(guard)
    return backend
