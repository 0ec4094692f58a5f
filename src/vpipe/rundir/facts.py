"""What a run says that it runs: run.json, which the trainer writes (``journal``) and pages read.

The trainer tells every fact. A run of an earlier version may lack some: what is not told is ``None`` or empty. A fact
that is not of its kind was not written by a trainer, and the file is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vpipe.records import parsed


@dataclass(frozen=True)
class RunModel:
    """What is trained."""

    name: str | None = None
    parameters: int | None = None
    flops_per_token: float | None = None
    num_layers: int | None = None
    hidden_size: int | None = None


@dataclass(frozen=True)
class RunStage:
    """What one stage holds."""

    stage: int | None = None
    layers: tuple[str, ...] = ()
    parameters: int | None = None
    weight_bytes: int | None = None


@dataclass(frozen=True)
class RunFacts:
    """run.json; its keys are these fields, in this order."""

    run: str | None = None
    vpipe: str | None = None
    torch: str | None = None
    started: str | None = None
    schedule: str | None = None
    synchronous: bool | None = None
    num_ranks: int | None = None
    num_stages: int | None = None
    num_microbatches: int | None = None
    """Of the program: an asynchronous schedule chains those of several iterations."""
    microbatches_per_iteration: int | None = None
    partition: tuple[int, ...] | None = None
    """Layers per stage."""
    program: str | None = None
    """The program of one step with its communication, as CSV."""
    versions: str | None = None
    placement: tuple[tuple[int, ...], ...] | None = None
    """The ranks of each stage."""
    skips: tuple[tuple[int, ...], ...] = ()
    model: RunModel = field(default_factory=RunModel)
    stages: tuple[RunStage, ...] = ()
    hosts: tuple[str, ...] | None = None
    """Of each rank."""
    cores: int | None = None
    """That rank 0 may use."""
    threads: int | None = None
    """In which rank 0 computes one operation."""
    layout: Mapping[str, Any] | None = None
    """Who holds what, as ``Layout.as_document`` has it."""
    command: tuple[str, ...] | None = None
    trace: bool | None = None
    """Whether steps are recorded."""
    iterations: int | None = None
    iterations_per_epoch: int | None = None
    directory: str | None = None

    @classmethod
    def parse(cls, found: Any) -> RunFacts:
        """What the trainer wrote; ``ValueError`` for anything else."""
        told = {key: value for key, value in found.items() if value is not None} if isinstance(found, dict) else found
        return parsed(cls, told)

    def moved(self, now: RunFacts) -> RunFacts:
        """The facts of a run whose layers have moved: of ``now``, what follows from the layout."""
        return replace(
            self,
            partition=now.partition,
            layout=now.layout,
            program=now.program,
            stages=now.stages,
            skips=now.skips,
            placement=now.placement,
        )
