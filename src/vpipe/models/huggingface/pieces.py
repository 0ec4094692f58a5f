"""The cut of a model as plain data: which calls belong to which piece, and what goes between the pieces.

A block is a piece of its own; the calls between two blocks (embeddings, norms, heads) are one. What the model's code
computes between calls belongs to the piece of the call before, where it depends on parameters; all else (positions,
masks, angles) every piece computes for itself, since that is cheaper than sending it.

A value goes between pieces as the result of a call, put in its place when a later piece comes to that call; or, where
the code has made something of it, as an argument of the call that takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vpipe.errors import UserError
from vpipe.models.huggingface.recorder import RANDOM, Origin, Recording, ancestors
from vpipe.models.huggingface.trees import LeafPath

Place = tuple[int, LeafPath]
"""(number of the call, leaf): of its results where the leaf starts with ``out`` or ``hook``, else of its arguments."""
OUTPUT = "output"


@dataclass
class Piece:
    """One layer of the cut."""

    name: str
    calls: tuple[int, ...]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    taken: dict[Place, str] = field(default_factory=dict)
    """Where a value that was read is put."""
    given: dict[Place, str] = field(default_factory=dict)
    """Where a value that is written is found."""
    raw: tuple[str, ...] = ()
    """Parameters that the model's code uses without calling their module."""
    idle: tuple[str, ...] = ()
    """Modules that no call needs; they are kept with the last piece, as the model keeps them."""
    sizes: dict[str, tuple[tuple[Any, ...], torch.dtype]] = field(default_factory=dict)
    """Per input that this piece does not read, its size: each a number, or (value that is read, its dimension)."""
    last: bool = False
    cost_key: str = ""


@dataclass
class CallPlan:
    """The pieces, in order, and the calls that every run must make in this order."""

    paths: tuple[str, ...]
    inputs: tuple[str, ...]
    pieces: list[Piece]


def planned(
    recordings: Sequence[Recording], arguments: Sequence[Mapping[str, Any]], blocks: frozenset[str]
) -> CallPlan:
    """The cut that follows from four runs: the first, one with other sizes, one with other input values and one with
    other activations. The last two only confirm what the first showed of dependencies."""
    first, resized, other_inputs, other_values = recordings
    paths = tuple(call.path for call in first.calls)
    for recording in (resized, other_inputs, other_values):
        check_same(paths, recording)
    pieces = [Piece(named(paths, group, blocks), tuple(group)) for group in grouped(paths, blocks)]
    pieces[-1].last = True
    work = _Work(first, pieces)
    for index in range(len(pieces)):
        work.follow(index)
    names = tuple(arguments[0])
    confirm(work, first, other_inputs, other_values, names)
    work.write(names)
    size_inputs(work, first, resized, arguments)
    kept = [piece for piece in pieces if piece.writes or piece.last]
    return CallPlan(paths, names, kept)


def grouped(paths: Sequence[str], blocks: frozenset[str]) -> list[list[int]]:
    """The calls of each piece."""
    groups: list[list[int]] = []
    for index, path in enumerate(paths):
        if groups and path not in blocks and paths[index - 1] not in blocks:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def named(paths: Sequence[str], group: Sequence[int], blocks: frozenset[str]) -> str:
    return " + ".join(dict.fromkeys(paths[index] for index in group)) if len(group) < 4 else f"{paths[group[0]]} + …"


def check_same(paths: tuple[str, ...], recording: Recording) -> None:
    """The order of the calls must not depend on sizes or values."""
    if tuple(call.path for call in recording.calls) != paths:
        raise UserError(
            f"the model calls {len(paths)} modules for one input and {len(recording.calls)} for another, so its layers "
            "are not a list that a pipeline can cut"
        )


class _Work:
    """What every piece needs, found by going back from its calls to where their arguments come from."""

    def __init__(self, recording: Recording, pieces: list[Piece]) -> None:
        self.recording, self.pieces = recording, pieces
        self.home = {call: index for index, piece in enumerate(pieces) for call in piece.calls}
        self.needs: list[dict[str, None]] = [{} for _ in pieces]
        """Per piece, the inputs whose values it needs."""
        self.raw: list[dict[str, None]] = [{} for _ in pieces]
        self.read: list[dict[str, Origin]] = [{} for _ in pieces]
        self.arguments_of: dict[Origin, Place] = {}
        for index, call in enumerate(recording.calls):
            for path, origin in call.arguments.items():
                if origin is not None:
                    self.arguments_of.setdefault(origin, (index, path))

    def piece_of(self, origin: Origin) -> int:
        """The piece that computes a value."""
        return self.home[max(origin.time - 1, 0)]

    def follow(self, index: int) -> None:
        piece = self.pieces[index]
        self.needs[index].update(dict.fromkeys(sorted(self.recording.decided_by)))
        for number in piece.calls:
            for path, origin in self.recording.calls[number].arguments.items():
                if origin is None:
                    continue
                if origin.kind == "function" and origin.weighty and self.piece_of(origin) < index:
                    self.take(index, (number, path), origin)
                else:
                    self.need(index, origin)
        if piece.last:
            for origin in self.recording.output.values():
                if origin is not None:
                    self.need(index, origin)

    def take(self, index: int, place: Place, origin: Origin) -> None:
        """Read a value of an earlier piece."""
        name = self.name_of(origin)
        self.pieces[index].taken[place] = name
        self.read[index][name] = origin
        source = (origin.call, origin.leaf) if origin.kind == "call" else self.arguments_of[origin]
        writer = self.piece_of(origin)
        fresh = source not in self.pieces[writer].given
        self.pieces[writer].given[source] = name
        if origin.kind == "function" and fresh:
            self.need(writer, origin)

    def need(self, index: int, start: Origin) -> None:
        """Make a value available to a piece: read what calls of earlier pieces gave, compute the rest again."""
        waiting, seen = [start], {start}
        while waiting:
            origin = waiting.pop()
            if origin.kind == "input":
                self.needs[index][origin.name] = None
            elif origin.kind == "raw":
                self.raw[index][origin.name] = None
            elif origin.kind == "call":
                if self.piece_of(origin) != index:
                    self.take(index, (origin.call, origin.leaf), origin)
            else:
                if origin.weighty and origin.name in RANDOM and self.piece_of(origin) != index:
                    raise UserError(
                        f"the model uses a result of {origin.name}, which is random, in the code of a later layer, "
                        f"{self.pieces[index].name}; set its probability to 0 to train the model in a pipeline"
                    )
                fresh = [parent for parent in origin.parents if parent not in seen]
                seen.update(fresh)
                waiting.extend(fresh)

    def name_of(self, origin: Origin) -> str:
        if origin.kind == "call":
            call = self.recording.calls[origin.call]
            rest = ".".join(str(step) for step in origin.leaf if step != "out")
            turn = sum(other.path == call.path for other in self.recording.calls[: origin.call])
            return call.path + (f"#{turn}" if turn else "") + (f":{rest}" if rest else "")
        number, path = self.arguments_of[origin]
        return f"to {self.recording.calls[number].path}:" + ".".join(str(step) for step in path[1:]) + f"@{number}"

    def write(self, names: tuple[str, ...]) -> None:
        """Fix what each piece reads and writes."""
        for index, piece in enumerate(self.pieces):
            piece.raw = tuple(self.raw[index])
            inputs = [name for name in names if name in self.needs[index]]
            piece.reads = (*self.read[index], *inputs)
            piece.writes = (OUTPUT,) if piece.last else tuple(dict.fromkeys(piece.given.values()))


def confirm(
    work: _Work, first: Recording, other_inputs: Recording, other_values: Recording, names: tuple[str, ...]
) -> None:
    """Every dependency shows when what it depends on changes: none that was not followed may be there."""
    for index, piece in enumerate(work.pieces):
        found = [(first.calls[call], other_inputs.calls[call], other_values.calls[call]) for call in piece.calls]
        pairs = [
            (path, call.arguments.get(path), call.values.get(path), moved.values.get(path), filled.values.get(path))
            for call, moved, filled in found
            for path in {**call.values, **moved.values, **filled.values}
        ]
        if piece.last:
            every = {**first.values, **other_inputs.values, **other_values.values}
            pairs += [
                (path, first.output.get(path), first.values.get(path), other_inputs.values.get(path),
                 other_values.values.get(path))
                for path in every
            ]  # fmt: skip
        for _, origin, value, moved, filled in pairs:
            if differ(value, filled) and not (origin is not None and origin.weighty):
                raise UserError(
                    f"an argument of {piece.name} depends on layers before it in a way that cannot be followed, so "
                    "this model is not cut"
                )
            known = origin is not None and any(o.kind == "input" for o in ancestors((origin,)))
            if differ(value, moved) and not known:
                work.needs[index].update(dict.fromkeys(names))


def differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape != other.shape or not torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    simple = (bool, int, float, str)
    if isinstance(one, simple) and isinstance(other, simple):
        return one != other
    return type(one) is not type(other)


def size_inputs(work: _Work, first: Recording, resized: Recording, arguments: Sequence[Mapping[str, Any]]) -> None:
    """How a piece knows the size of an input that it does not read: from the sizes of what it reads."""
    for index, piece in enumerate(work.pieces):
        for name in arguments[0]:
            if name in piece.reads or not isinstance(arguments[0][name], Tensor):
                continue
            rule = sized(work, index, name, resized, arguments)
            end = max((call for call, _ in piece.given), default=0)
            if rule is None and not piece.last and first.touched.get(name, 1 << 30) > end:
                rule = tuple(arguments[0][name].shape)  # the run ends before the code looks at this input
            if rule is None:
                piece.reads = (*piece.reads, name)
            else:
                piece.sizes[name] = (rule, arguments[0][name].dtype)


def sized(
    work: _Work, index: int, name: str, resized: Recording, arguments: Sequence[Mapping[str, Any]]
) -> tuple[Any, ...] | None:
    known: list[tuple[Any, int, int]] = []
    for value, origin in work.read[index].items():
        other = twin(origin, work, resized)
        known += [((value, d), a, b) for d, (a, b) in enumerate(zip(origin.size, other.size, strict=False))]
    for value in work.pieces[index].reads:
        if value in arguments[0]:
            one, two = arguments[0][value], arguments[1][value]
            known += [((value, d), a, b) for d, (a, b) in enumerate(zip(one.shape, two.shape, strict=True))]
    rule: list[Any] = []
    for a, b in zip(arguments[0][name].shape, arguments[1][name].shape, strict=True):
        match = a if a == b else next((where for where, x, y in known if (x, y) == (a, b)), None)
        if match is None:
            return None
        rule.append(match)
    return tuple(rule)


def twin(origin: Origin, work: _Work, resized: Recording) -> Origin:
    """The same value in the run with other sizes."""
    if origin.kind == "call":
        return resized.calls[origin.call].results[origin.leaf]
    number, path = work.arguments_of[origin]
    found = resized.calls[number].arguments[path]
    assert found is not None
    return found
