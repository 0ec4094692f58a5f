"""VPipe's plan file: ``{"partition": [12, 13, …], "recompute_ratio": [0.3, 0, …]}``.

Its one freedom is a ratio r per stage: the last ``int(r · n)`` of the stage's n layers are recomputed. A plan of ours
may recompute any layers and swap others; then the file gets the nearest stage of that form that fits, and a note says
so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vpipe.plan.costs import Profile
from vpipe.plan.layout import PlannedLayout, to_ratio
from vpipe.plan.memory import Choice, StageFacts, stage_memory
from vpipe.plan.units import format_bytes


def to_vpipe(
    layout: PlannedLayout, profile: Profile | None = None, facts: Sequence[StageFacts] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The file's content, and a note for every stage that is not what the plan says.

    With a profile and the stages' facts the nearest form is the shortest tail that fits; without, as many layers are
    recomputed as the plan recomputes and swaps.
    """
    ratios, notes = [], []
    for stage, choices in enumerate(layout.choices):
        count = len(choices)
        again = choices.count(Choice.RECOMPUTE)
        tail = again
        if choices != _tail(count, again):
            tail = count - choices.count(Choice.KEEP)
            over = 0.0
            if profile is not None and facts is not None:
                tail, over = _shortest(layout, stage, profile, facts[stage])
            swapped = choices.count(Choice.SWAP)
            planned = f"the plan recomputes {again} and swaps {swapped} of {count} layers"
            note = f"stage {stage}: {planned}; written as the last {tail} recomputed"
            notes.append(note + (f", which is {format_bytes(over)} too large" if over > 0 else ""))
        ratios.append(to_ratio(tail, count))
    return {"partition": list(layout.counts), "recompute_ratio": ratios}, notes


def _tail(count: int, again: int) -> tuple[Choice, ...]:
    return (Choice.KEEP,) * (count - again) + (Choice.RECOMPUTE,) * again


def _shortest(layout: PlannedLayout, stage: int, profile: Profile, facts: StageFacts) -> tuple[int, float]:
    """The shortest recomputed tail that fits, or the smallest one, and by how many bytes it does not fit."""
    start, stop = layout.cuts[stage], layout.cuts[stage + 1]
    ends = {"first": stage == 0, "last": stage == layout.num_stages - 1}
    sizes = [
        stage_memory(profile, start, stop, _tail(stop - start, again), facts, **ends).total
        for again in range(stop - start + 1)
    ]
    for again, size in enumerate(sizes):
        if size <= facts.memory:
            return again, 0.0
    again = sizes.index(min(sizes))
    return again, sizes[again] - facts.memory
