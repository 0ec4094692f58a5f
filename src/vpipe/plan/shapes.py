"""Shapes of a machine: into how many stages and replicas a number of ranks is divided.

A synchronous schedule runs d equal pipelines of N/d ranks side by side. PipeDream may have other numbers of replicas
for every stage; which, is a dynamic program over (layers, ranks) by the time of the slowest stage, as PipeDream's own:

    best(j layers, n ranks) = min over i, r of  max( best(i, n-r),  work(i..j) / r,  messages at i )

It proposes one shape for every number of stages; the simulated step decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vpipe.plan.costs import Profile
from vpipe.plan.machine import Machine
from vpipe.schedule.authors.authoring import Entry


@dataclass(frozen=True)
class Shape:
    """Ranks of one pipeline, microbatches of one pipeline, replicas of every stage (empty: one)."""

    num_ranks: int
    num_microbatches: int
    replicas: tuple[int, ...] = ()
    pipelines: int = 1


def shapes(profile: Profile, machine: Machine, entry: Entry, num_microbatches: int) -> Iterator[Shape]:
    """Every way to divide the ranks that the schedule has, for ``num_microbatches`` of all replicas together."""
    total = machine.num_ranks
    if not entry.asynchronous:
        for d in (d for d in range(1, total + 1) if total % d == 0 and num_microbatches % d == 0):
            p = total // d
            if p * entry.stages_per_rank <= profile.num_layers:
                yield Shape(p, num_microbatches // d, (d,) * p if d > 1 else (), d)
    elif entry.takes_replicas:
        for replicas in _divided(profile, machine, total):
            if all(num_microbatches % r == 0 for r in replicas):
                yield Shape(len(replicas), num_microbatches, () if set(replicas) == {1} else replicas)
    elif total <= profile.num_layers:
        yield Shape(total, num_microbatches)


def _divided(profile: Profile, machine: Machine, total: int) -> list[tuple[int, ...]]:
    """For each number of stages, the replicas with which the slowest stage is quickest; and one of each."""
    work = np.concatenate([[0.0], np.cumsum([layer.total for layer in profile.layers])])
    everyone = range(machine.num_ranks)
    byte = machine.seconds_per_byte(profile, everyone, everyone)
    links = byte * np.add(profile.cut_bytes, profile.back_bytes, dtype=np.float64)
    layers, most = profile.num_layers, min(total, profile.num_layers)
    best = np.full((layers + 1, total + 1), np.inf)
    best[0, 0] = 0.0
    found: list[tuple[int, ...]] = []
    steps: list[dict[tuple[int, int], tuple[int, int]]] = []
    for _ in range(most):
        now = np.full_like(best, np.inf)
        origin: dict[tuple[int, int], tuple[int, int]] = {}
        for stop in range(1, layers + 1):
            for r in range(1, total + 1):
                stage = np.maximum((work[stop] - work[:stop]) / r, np.where(np.arange(stop) > 0, links[:stop], 0.0))
                value = np.maximum(best[:stop, : total + 1 - r], stage[:, None])
                start = value.argmin(axis=0)
                for before in range(total + 1 - r):
                    least = value[start[before], before]
                    if least < now[stop, before + r]:
                        now[stop, before + r] = least
                        origin[stop, before + r] = int(start[before]), r
        best = now
        steps.append(origin)
        if np.isfinite(best[layers, total]):
            place, replicas = (layers, total), []
            for each in reversed(steps):
                start, r = each[place]
                replicas.append(r)
                place = start, place[1] - r
            found.append(tuple(reversed(replicas)))
    if total <= layers:
        found.append((1,) * total)
    return list(dict.fromkeys(found))
