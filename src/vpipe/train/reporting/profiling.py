"""``profile_iteration``: one iteration under torch.profiler, its events named like the actions of the schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, supported_activities, tensorboard_trace_handler

from vpipe.runtime.pipeline import Pipeline


@contextmanager
def profiled(pipeline: Pipeline, directory: Path) -> Iterator[None]:
    """Record what happens inside into ``directory/rank<N>/``, readable by TensorBoard and Perfetto.

    Ranks that are threads of one process share one trace: torch's profiler sees other threads only if it is told to.
    """
    where = directory / f"rank{pipeline.rank}"
    activities = sorted(supported_activities(), key=str)  # type: ignore[no-untyped-call]
    with (
        pipeline.annotated(),
        profile(
            activities=activities,
            on_trace_ready=tensorboard_trace_handler(str(where)),
            experimental_config=_ExperimentalConfig(profile_all_threads=len(pipeline.ranks) > 1),
        ),
    ):
        yield
