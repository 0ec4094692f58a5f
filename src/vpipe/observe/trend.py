"""How ranks fared over the steps of a run: work, waiting and memory of each, and who has become slow.

A rank that always works longer than the others has too much to do: that is imbalance, and the verdict's business. A
**straggler** has become slower than it was (its device throttles) while the others have not, or is
slower than the replicas that do the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, TypeVar

from vpipe.observe.memory import tensor_bytes
from vpipe.rundir.reader import RunDirectory

POINTS = 240
"""Of a curve of a rank."""
SLOWER = 1.2
"""Times as long as before, or as its replicas, from which a rank is a straggler."""
LEAST = 12
"""Steps from which on a rank's past says something."""

T = TypeVar("T")
RankFacts = dict[int, dict[str, Any]]


def trend(run: RunDirectory, most_bytes: int) -> dict[str, Any]:
    """Columns over steps: per rank, seconds of work, of waiting and of the host's lead over its device, and bytes; and
    the stragglers."""
    ranks: list[RankFacts] = [
        {int(line["step"]): line for line in run.step_summaries(rank, most_bytes) if _usable(line)}
        for rank in range(run.num_ranks)
    ]
    shared = sorted(set.intersection(*map(set, ranks))) if ranks else []
    busy = [[row[step]["busy"] * 1e-9 for step in shared] for row in ranks]
    stragglers = _stragglers(run, busy) if len(shared) >= LEAST else {}
    chosen = thinned(shared, POINTS)
    memory = [[tensor_bytes(row[step].get("memory") or {}) for step in chosen] for row in ranks]
    process = [[(row[step].get("memory") or {}).get("rss") for step in chosen] for row in ranks]
    ahead: list[list[Any]] = [[row[step].get("ahead") for step in chosen] for row in ranks]
    on_devices = ranks and all(isinstance(value, int) for row in ahead for value in row)
    return {
        "iterations": [ranks[0][step].get("iteration", step) for step in chosen],
        "busy": [[_short(row[step]["busy"]) for step in chosen] for row in ranks],
        "waited": [[_short(row[step]["waited"]) for step in chosen] for row in ranks],
        "ahead": [[_short(value) for value in row] for row in ahead] if on_devices else None,
        "tensors": memory if any(value is not None for row in memory for value in row) else None,
        "process": process if any(value is not None for row in process for value in row) else None,
        "stragglers": {str(rank): why for rank, why in stragglers.items()},
    }


def thinned(values: Sequence[T], most: int) -> list[T]:
    """Evenly chosen values, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    stride = (len(values) - 1) / (most - 1)
    return [values[round(index * stride)] for index in range(most)]


def _usable(line: dict[str, Any]) -> bool:
    return all(isinstance(line.get(key), int) for key in ("step", "busy", "waited"))


def _short(nanoseconds: int) -> float:
    return float(f"{nanoseconds * 1e-9:.4g}")


def _stragglers(run: RunDirectory, busy: Sequence[Sequence[float]]) -> dict[int, str]:
    """Rank → why it is one. Steps of different programs take different times, so ranks are compared as shares."""
    whole = [sum(row[i] for row in busy) or 1.0 for i in range(len(busy[0]))]
    shares = [[value / total for value, total in zip(row, whole, strict=True)] for row in busy]
    recent = max(3, len(whole) // 5)
    now = [median(row[-recent:]) for row in shares]
    before = [median(row[1 : -recent or None]) for row in shares]
    ratio = [_times(a, 1 - a) / _times(b, 1 - b) for a, b in zip(now, before, strict=True)]
    found = {
        rank: f"works {each:.2f} times as long as earlier in this run"
        for rank, each in enumerate(ratio)
        if each >= SLOWER
    }
    for ranks in run.program.placement.ranks_of:
        if len(ranks) > 1:
            for rank in ranks:
                others = median(now[other] for other in ranks if other != rank)
                if now[rank] >= SLOWER * others:
                    found[rank] = f"works {now[rank] / others:.2f} times as long as the replicas of its stage"
    return found


def _times(share: float, rest: float) -> float:
    """A rank's time in units of the others': one that doubles its work doubles this."""
    return share / rest if rest > 0 else 1.0
