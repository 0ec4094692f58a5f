"""A run for Perfetto and chrome://tracing: Chrome's JSON of events, gzipped.

    process  a rank            thread 0  compute: one slice per action, from when it had what it needed to its end
                               thread 1  messages: SEND and RECV as the rank posts them
                               thread 2  swaps: OUT and IN while they run, where a rank swaps
                               thread 0 also shows "wait" slices: the rank had come to an action that was not ready
    arrows   from the action that made a message to the action that used it
    counters what the rank holds, per step

Slices are named as the schedule writes actions, so the trace reads back into a program (``programs``) and the verifier
that passed the plan can pass what was executed.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from vpipe.errors import UserError
from vpipe.observe.measured import Measured, computes
from vpipe.schedule.action import Action, parse
from vpipe.schedule.semantics import NAMES

COMPUTE, MESSAGES, SWAPS = 0, 1, 2
"""The threads of a rank."""
WAIT = "wait"
_IDS = 10
"""Numbers between two processes. To Perfetto a number is one thread, whatever its process, and none is 0."""


def events(steps: Sequence[Measured]) -> Iterator[dict[str, Any]]:
    """The trace events of these steps, one after the other on one clock."""
    if steps:
        yield from _names(steps[0])
    at, numbers = 0, count(1)
    for step in steps:
        at += step.lead
        yield from _slices(step, at)
        yield from _arrows(step, at, numbers)
        yield from _counters(step, at)
        at += step.span


def write(path: str | Path, steps: Sequence[Measured], about: Mapping[str, Any] | None = None) -> None:
    """The trace as a file that Perfetto opens."""
    found = {"traceEvents": list(events(steps)), "displayTimeUnit": "ms", "otherData": dict(about or {})}
    data = gzip.compress(json.dumps(found, separators=(",", ":")).encode(), compresslevel=6, mtime=0)
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def programs(path: str | Path) -> dict[int, list[list[Action]]]:
    """Step → per rank, the actions that a trace says were executed."""
    try:
        data = json.loads(gzip.decompress(Path(path).read_bytes()))
        found = [each for each in data["traceEvents"] if each["ph"] == "X" and each["cat"] != WAIT]
        steps: dict[int, dict[int, list[tuple[int, Action]]]] = {}
        for each in found:
            rank = steps.setdefault(each["args"]["step"], {}).setdefault(each["pid"] // _IDS, [])
            rank.append((each["args"]["index"], parse(each["name"])))
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a trace of vpipe, or it is cut off: {error}") from None
    return {
        step: [[action for _, action in sorted(ranks[rank])] for rank in sorted(ranks)] for step, ranks in steps.items()
    }


def _names(step: Measured) -> Iterator[dict[str, Any]]:
    for rank, stages in enumerate(step.program.placement.stages_of):
        held = f"stage {stages[0]}" if len(stages) == 1 else "stages " + " ".join(map(str, stages))
        yield _meta("process_name", rank, 0, {"name": f"rank {rank} ({held})"})
        yield _meta("process_sort_index", rank, 0, {"sort_index": rank})
        yield _meta("thread_name", rank, COMPUTE, {"name": "compute"})
        yield _meta("thread_name", rank, MESSAGES, {"name": "messages"})
        if rank < len(step.swaps) and step.swaps[rank]:
            yield _meta("thread_name", rank, SWAPS, {"name": "swaps"})


def _meta(name: str, rank: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, **_where(rank, thread), "args": args}


def _where(rank: int, thread: int = COMPUTE) -> dict[str, int]:
    """The rank's process, whose main thread computes."""
    process = _IDS * (rank + 1)
    return {"pid": process, "tid": process + thread}


def _slices(step: Measured, at: int) -> Iterator[dict[str, Any]]:
    for rank, row in enumerate(step.ranks):
        lane = {event.action: event for event in (step.swaps[rank] if step.swaps else ())}
        for index, handed in enumerate(row):
            event = lane.get(handed.action, handed)
            stage, kind, microbatch = event.action
            if event.ready - event.begin >= 1000 and event is handed:
                why = {"step": step.step, "for": str(event.action)}
                yield _slice(WAIT, WAIT, rank, COMPUTE, at + event.begin, event.ready - event.begin, why)
            args: dict[str, Any] = {"step": step.step, "index": index, "stage": stage}
            if microbatch >= 0:
                args |= {"microbatch": microbatch, "version": event.version}
            if event.bytes:
                args["bytes"] = event.bytes
            thread = COMPUTE if computes(event) else MESSAGES if event is handed else SWAPS
            name = NAMES.get(kind, kind.value)
            yield _slice(str(event.action), name, rank, thread, at + event.ready, event.end - event.ready, args)


def _slice(
    name: str, category: str, rank: int, thread: int, at: int, length: int, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        **_where(rank, thread),
        "ts": at / 1000,
        "dur": length / 1000,
        "args": args,
    }


def _arrows(step: Measured, at: int, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    """From the end of what made a message to the start of what used it; drawn inside both slices.

    Perfetto drops an arrow whose id is neither a number nor hexadecimal.
    """
    made = {event.action: (rank, event) for rank, row in enumerate(step.ranks) for event in row}
    for rank, row in enumerate(step.ranks):
        for event in row:
            for source in step.producers.get(event.action, ()):
                peer, maker = made[source]
                if maker.end == maker.ready or event.end == event.ready:
                    continue
                common = {"cat": "message", "name": "message", "id": next(numbers)}
                yield {**common, **_where(peer), "ph": "s", "ts": (at + maker.end - 1) / 1000}
                yield {**common, **_where(rank), "ph": "f", "bp": "e", "ts": (at + event.ready) / 1000}


def _counters(step: Measured, at: int) -> Iterator[dict[str, Any]]:
    for rank, memory in enumerate(step.memory):
        held = {key: value for key, value in memory.items() if value >= 0}
        versions = {"held": held.pop("versions")} if "versions" in held else {}
        for name, args in (("memory", held), ("weight versions", versions)):
            if args:
                yield {"ph": "C", "name": name, **_where(rank), "ts": at / 1000, "args": args}
