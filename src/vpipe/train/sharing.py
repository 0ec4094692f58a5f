"""``parallel.priority`` and ``use_orion_scheduler``: whose turn it is on a device that several ranks share."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

from vpipe.config import PipelineConfig
from vpipe.runtime.engine import Engine
from vpipe.runtime.pipeline import Pipeline
from vpipe.runtime.priorities.backend import priority_backend
from vpipe.runtime.priorities.order import Backend


class Turns:
    """The guard of one engine: before it computes an action, it waits for that action's turn."""

    def __init__(self, engine: Engine, backend: Backend, inner: AbstractContextManager[object] | None) -> None:
        self._engine, self._backend, self._inner = engine, backend, inner
        self._held = ExitStack()

    def __enter__(self) -> None:
        action = self._engine.current
        assert action is not None, "an engine computes only actions of its program"
        self._held.enter_context(self._backend.turn(action))
        if self._inner is not None:
            self._held.enter_context(self._inner)

    def __exit__(self, *_: object) -> None:
        self._held.close()


def share_device(pipeline: Pipeline, config: PipelineConfig) -> Backend | None:
    """Let the engines of this process take turns as the config says; ``None`` where it says nothing.

    A turnstile lets one in at a time, as the engines' own lock does, and takes its place. Orion orders what the device
    does, not who may call it, so there the lock stays.
    """
    parallel = config.parallel
    if parallel.priority == "none" and not parallel.use_orion_scheduler:
        return None
    backend = priority_backend(
        parallel.priority, use_orion=parallel.use_orion_scheduler, num_microbatches=config.training.num_microbatches
    )

    def guard(engine: Engine) -> None:
        engine._guard = Turns(engine, backend, engine._guard if parallel.use_orion_scheduler else None)

    pipeline.each_engine(guard)
    return backend
