"""The clocks of a run's ranks, aligned with rank 0's while it goes on (``observe.clock`` explains how).

Ranks of one machine read one clock and need not ask. Between machines clocks drift apart, so rank 0 also says after how
many iterations all ask again: about every ``AGAIN`` seconds.

    every rank    before ─▶ barrier ─▶ gather: rank 0's time, read after the barrier ─▶ after

What a rank does with its time within one iteration, torch's profiler records (``profiled``, for ``profile_iteration``),
its events named like the actions of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, supported_activities, tensorboard_trace_handler

from vpipe.observe.clock import Offset, identity, offset
from vpipe.runtime.pipeline import Pipeline

AGAIN = 20.0
"""Seconds between two alignments, about: at 10 µs a second clocks have then moved by 0.2 ms."""
ROUNDS = 8


class Clocks:
    """What this rank adds to its clock. Every rank calls everything here at the same iterations."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._asks = len(set(pipeline.gather(identity()))) > 1
        self._next = 0
        self._pause = 1
        self._last = (0, perf_counter_ns())
        self.offset = Offset(0, 0)
        self.error: int | None = None
        """How wrong the offset of any rank may be, in nanoseconds; ``None`` where all read one clock."""

    def align(self, iteration: int) -> None:
        """Before an iteration: ask, if it is time."""
        if not self._asks or iteration < self._next:
            return
        (before, then), now = self._last, perf_counter_ns()
        if iteration > before:
            self._pause = max(1, int((iteration - before) * AGAIN * 1e9 / (now - then)))
        self._last = iteration, now
        found = offset(self._ask, ROUNDS)
        self.offset = Offset(0, 0) if self._pipeline.is_leader else found
        self.error = max(int(error) for (error,) in self._pipeline.gather_numbers([self.offset.error]))

    def _ask(self) -> int:
        """Rank 0's time at a moment inside this call; floats carry whole nanoseconds for 104 days after a boot."""
        self._pipeline.transport.barrier()
        time, pause = self._pipeline.gather_numbers([perf_counter_ns(), self._pause])[0]
        self._next = self._last[0] + int(pause)
        return int(time)


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
