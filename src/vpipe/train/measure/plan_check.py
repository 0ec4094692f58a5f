"""``vpipe plan --check``: what every rank runs to see whether a plan does what it predicts.

A few steps of the real thing, by the plan's schedule and partition. A stage's time is the sum of what its actions of
one microbatch take, once they have what they need. A rank's memory is counted twice: the bytes of its tensors at their
peak, which is what a plan predicts, and the peak of what the process holds beyond an empty one. An asynchronous
schedule is measured in its steady state: what one batch more takes between two drains.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median
from time import perf_counter, time_ns
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from torch.profiler import ProfilerActivity, profile

from vpipe.config import PipelineConfig
from vpipe.process import resident_bytes, under_launcher
from vpipe.rundir import writing
from vpipe.runtime import assembly
from vpipe.runtime.memory.swap import Swappable
from vpipe.runtime.updates.weights import count_bytes
from vpipe.schedule.action import OF_A_STAGE, Kind
from vpipe.schedule.semantics import LANE, Lane
from vpipe.train.session import Session, open_session

WARM_UP = 2
OFTEN_ENOUGH = 3
"""Batches more, from which the time of one follows."""
ALIGNMENT = 64
"""Of memory for tensors, as torch's own."""


@dataclass
class Seen:
    """What a rank has measured."""

    steps: list[float] = field(default_factory=list)
    actions: dict[tuple[int, Kind], list[int]] = field(default_factory=lambda: defaultdict(list))
    tensors: int = 0
    resident: int = 0

    def to_json(self) -> dict[str, Any]:
        lanes: dict[tuple[int, Lane], float] = defaultdict(float)
        for (stage, kind), times in self.actions.items():
            lanes[stage, LANE[kind]] += median(times) / 1e9
        # A stage swaps beside its work: the longer of the two is its time.
        stages: dict[int, float] = defaultdict(float)
        for (stage, lane), time in lanes.items():
            if lane is not Lane.LINK:
                stages[stage] = max(stages[stage], time)
        return {
            "steps": self.steps,
            "stages": {str(stage): time for stage, time in stages.items()},
            "tensors": self.tensors,
            "resident": self.resident,
        }


def steps(config: dict[str, Any], directory: str, num_steps: int) -> int:
    """Train a few steps as one of the ranks, and write down what they took."""
    checked = PipelineConfig.from_dict(config)
    if checked.launch.threads:
        torch.set_num_threads(checked.launch.threads)
    if under_launcher():
        assembly.join(checked.parallel.timeout)
    empty = _empty()
    session = open_session(checked)
    seen = Seen()
    counts = _chains(session)
    rank = session.pipeline.rank
    for number in range(WARM_UP + num_steps):
        _tell(Path(directory), rank, number, WARM_UP + num_steps + 1, f"step {number + 1}")
        if number == WARM_UP:
            _forget_peak()
        taken = [_train(session, count, seen if number >= WARM_UP else Seen()) for count in counts]
        if number >= WARM_UP:
            between = counts[-1] - counts[0]
            seen.steps.append((taken[-1] - taken[0]) / between if between else taken[0])
    seen.resident = _peak() - empty
    _tell(Path(directory), rank, WARM_UP + num_steps, WARM_UP + num_steps + 1, "memory")
    seen.tensors = _held(session) + _allocated(session, counts[-1])
    (Path(directory) / f"check{rank}.json").write_text(json.dumps(seen.to_json()))
    session.close()
    return 0


def _tell(directory: Path, rank: int, done: int, total: int, name: str) -> None:
    """Rank 0 says how far it is, for the launcher; a reader sees the file before or after, never half of it."""
    if rank == 0:
        writing.replace(directory / "progress.json", {"done": done, "total": total, "name": name})


def _chains(session: Session) -> list[int]:
    """How many batches to run at once, one after the other."""
    if session.pipeline.synchronous:
        return [1]
    full = 1 + 2 * session.config.num_ranks // session.config.training.num_microbatches
    return [full, full + OFTEN_ENOUGH]


def _train(session: Session, num_batches: int, seen: Seen) -> float:
    positions = [(0, 0)] * num_batches
    units = session.read(positions)
    num_microbatches = session.prepare(num_batches)
    begin = perf_counter()
    session.train_step(units, num_microbatches=num_microbatches)
    seconds = perf_counter() - begin
    for records in session.pipeline.trace().records.values():
        for record in records:
            if record.action.kind not in OF_A_STAGE:
                seen.actions[record.action.stage, record.action.kind].append(record.end - record.ready)
    return seconds


def _held(session: Session) -> int:
    """Bytes of weights, buffers and optimizer states, which live from step to step."""
    states = [state for made in session.pipeline.optimizers.values() for state in made.state.values()]
    tensors = [each for state in states for each in state.values() if isinstance(each, Tensor)]
    return count_bytes([*session.pipeline.state_dict().values(), *tensors])


def _allocated(session: Session, num_batches: int) -> int:
    """The most bytes of tensors that a step has allocated and not yet freed, by the allocator's own account.

    The profiler sees one thread; what the swap lane frees and takes in its own is watched beside it.
    """
    lane = Swappable.watch = LaneBytes()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            _train(session, num_batches, Seen())
    finally:
        Swappable.watch = None
    assert watched.profiler is not None
    results: Any = watched.profiler.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    return max(accumulate(size for _, size in sorted(changes + lane.changes)), default=0)


class LaneBytes:
    """What the swap lane frees and takes: (when, bytes), by the profiler's clock.

    What leaves is freed by the lane, unless the rank still holds it and frees it itself, where the profiler sees it.
    What comes back gets memory that is not the allocator's, so that its end is seen here and nowhere else: a profiler
    knows the bytes of an allocation in another thread by chance alone.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[int, int]] = []
        self._watched = threading.get_ident()

    def leaving(self, storage: UntypedStorage) -> None:
        weakref.finalize(storage, self._left, storage.nbytes())

    def room(self, num_bytes: int) -> UntypedStorage:
        memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
        begin = -memory.ctypes.data % ALIGNMENT
        self.changes.append((time_ns(), num_bytes))
        weakref.finalize(memory, self._freed, num_bytes)
        return torch.from_numpy(memory[begin : begin + num_bytes]).untyped_storage()

    def resized(self, num_bytes: int) -> None:
        self.changes.append((time_ns(), num_bytes))

    def _left(self, num_bytes: int) -> None:
        if threading.get_ident() != self._watched:
            self._freed(num_bytes)

    def _freed(self, num_bytes: int) -> None:
        self.changes.append((time_ns(), -num_bytes))


def _empty() -> int:
    """What this process has in memory once it has trained something of no size: libraries load on their first use."""
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(8, 8)).sum().backward()
    optimizer.step()
    return resident_bytes()


def _forget_peak() -> None:
    """Let the peak count from here: building a model may need more for a moment than training it."""
    with suppress(OSError):  # then it counts from the start
        Path(f"/proc/{os.getpid()}/clear_refs").write_text("5")


def _peak() -> int:
    """The most that this process has had in memory."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resident_bytes()
