"""What a planner answers: a layout under a schedule, what it is predicted to do, and how good that provably is.

Words: docs/glossary.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from vpipe.plan import show
from vpipe.plan.costs import write_text
from vpipe.plan.layout import PlannedLayout
from vpipe.plan.predict import Prediction


@dataclass(frozen=True)
class Plan:
    """A layout under a schedule, what it is predicted to do, and the proof."""

    layout: PlannedLayout
    schedule: str
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int
    microbatch_rows: int
    memory: tuple[float, ...]
    prediction: Prediction
    lower_bound: float
    """No plan under this schedule and memory has a shorter step."""
    limit: str
    """What keeps it from being faster, in words."""
    ranking: tuple[tuple[str, float], ...] = ()
    """Where several schedules, shapes or numbers of microbatches were tried: each that fits with its step time, best
    first."""
    replicas: tuple[int, ...] = ()
    """Of every stage; empty: one of each."""
    order: tuple[int, ...] = ()
    """Which of the given ranks is rank i, where the order was free; empty: as given."""
    asynchronous: bool = False

    @property
    def total_ranks(self) -> int:
        """All processes, replicas included."""
        return len(self.memory)

    @property
    def stage_caps(self) -> tuple[float, ...]:
        """With one stage per rank: the least that a replica of each stage has."""
        if not self.asynchronous:
            return tuple(min(self.memory[stage :: self.num_ranks]) for stage in range(self.num_ranks))
        ends = list(accumulate(self.replicas or (1,) * self.num_ranks))
        return tuple(min(self.memory[a:b]) for a, b in pairwise([0, *ends]))

    @property
    def rows(self) -> int:
        """Of a whole step."""
        pipelines = self.replicas[0] if self.replicas and not self.asynchronous else 1
        return self.num_microbatches * self.microbatch_rows * pipelines

    @property
    def step_time(self) -> float:
        return self.prediction.step_time

    @property
    def gap(self) -> float:
        """By how much the step is above the bound."""
        return max(0.0, self.step_time / self.lower_bound - 1) if self.lower_bound > 0 else 0.0

    @property
    def exact(self) -> bool:
        return self.gap <= 2e-9

    def to_json(self) -> dict[str, Any]:
        p = self.prediction
        return {
            "format": "vpipe-plan",
            "version": 1,
            "schedule": self.schedule,
            "num_ranks": self.num_ranks,
            "stages_per_rank": self.stages_per_rank,
            "num_microbatches": self.num_microbatches,
            "microbatch_rows": self.microbatch_rows,
            "replicas": list(self.replicas),
            "order": list(self.order),
            "asynchronous": self.asynchronous,
            **self.layout.to_json(),
            "step_time": p.step_time,
            "bubble": p.bubble,
            "stage_times": list(p.stage_times),
            "stage_memory": [terms.to_json() for terms in p.stage_memory],
            "rank_memory": list(p.rank_memory),
            "memory": [None if cap == float("inf") else cap for cap in self.memory],
            "objective": self.step_time,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "exact": self.exact,
            "limit": self.limit,
            "ranking": [{"schedule": name, "step_time": time} for name, time in self.ranking],
        }

    def save(self, path: str | Path) -> None:
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    def table(self) -> str:
        """The plan as a person reads it."""
        return show.table(self)
