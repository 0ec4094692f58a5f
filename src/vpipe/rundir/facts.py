"""What a run says that it runs: run.json, which the trainer writes (``journal``) and whoever shows a run reads.

The trainer tells every fact. A run of an earlier version may lack some: what is not told is ``None`` or empty. A fact
that is not of its kind was written by nobody, and the file is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class RunModel:
    """What is trained."""

    name: str | None = None
    parameters: int | None = None
    flops_per_token: float | None = None


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
        parsed: RunFacts = _record(cls)(found)
        return parsed

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


Read = Callable[[Any], Any]


def _a(*kinds: type) -> Read:
    def read(value: Any) -> Any:
        if type(value) not in kinds:
            raise ValueError(f"{str(value)[:40]!r} is of type {type(value).__name__}, not {kinds[0].__name__}")
        return value

    return read


def _each(read: Read) -> Read:
    return lambda values: tuple(map(read, _a(list)(values)))


def _record(kind: type) -> Read:
    """Reads a dataclass of this file; keys that it does not have are a later version's, and left out."""

    def read(found: Any) -> Any:
        given = {}
        for name, read_value in _readers(kind).items():
            if _a(dict)(found).get(name) is not None:
                try:
                    given[name] = read_value(found[name])
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
        return kind(**given)

    return read


_READ: dict[str, Read] = {
    "str": _a(str),
    "int": _a(int),
    "bool": _a(bool),
    "float": _a(float, int),
    "Mapping[str, Any]": _a(dict),
    "tuple[str, ...]": _each(_a(str)),
    "tuple[int, ...]": _each(_a(int)),
    "tuple[tuple[int, ...], ...]": _each(_each(_a(int))),
    "RunModel": _record(RunModel),
    "tuple[RunStage, ...]": _each(_record(RunStage)),
}
"""How a field of this type is read."""


def _readers(kind: type) -> dict[str, Read]:
    return {each.name: _READ[str(each.type).removesuffix(" | None")] for each in fields(kind)}
