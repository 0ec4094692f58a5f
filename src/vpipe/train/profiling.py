"""``profile_iteration``: one iteration under torch.profiler, its events named like the actions of the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.profiler import profile, supported_activities, tensorboard_trace_handler

if TYPE_CHECKING:
    from vpipe.train.trainer import Trainer


@contextmanager
def profiled(trainer: Trainer, wanted: bool) -> Iterator[None]:
    """Record what happens inside into ``profiler_<scheduler>/rank<N>/`` of the run, readable by TensorBoard and
    Perfetto."""
    if not wanted:
        yield
        return
    engines = trainer.session.pipeline.engines
    name = f"profiler_{trainer.session.config.parallel.scheduler}"
    where = trainer.directory / name / f"rank{engines[0].rank}"
    activities = sorted(supported_activities(), key=str)  # type: ignore[no-untyped-call]
    for engine in engines:
        engine.annotates = True
    try:
        with profile(activities=activities, on_trace_ready=tensorboard_trace_handler(str(where))):
            yield
    finally:
        for engine in engines:
            engine.annotates = False
