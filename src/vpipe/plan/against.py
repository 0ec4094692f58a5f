"""Should this model be pipelined at all? The same batch by one device, by plain and by sharded data parallelism.

All are predicted from the same measured costs and links as the plan, for the rows of the plan's step:

| way    | a rank computes    | the links carry                             | a rank holds                          |
| ------ | ------------------ | ------------------------------------------- | ------------------------------------- |
| single | all units          | nothing                                     | everything, and what one unit saves   |
| ddp    | its share of units | gradients once, beside the last backward    | the same, and buckets of gradients    |
| fsdp   | its share, in as   | a round: each layer's weights twice and its | its part of everything, three layers' |
|        | few rounds as fit  | gradients once, one layer ahead             | weights, and what a round saves       |

A ring over n ranks moves (n-1)/n of a tensor to gather or to scatter it, twice that to reduce it for all. Computing and
sending are taken to run side by side, as on a device. What DDP and FSDP themselves cost (hooks, copies, sums, launches)
has no formula: ``vpipe profile`` measures it (``plan.sharding``), and with it computing and sending come one after the
other, since both were measured on the cores that they share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vpipe.errors import UserError, nearest
from vpipe.plan.costs import LayerCost, Profile, align
from vpipe.plan.machine import Machine
from vpipe.plan.units import format_bytes, format_seconds

DDP_BUCKET = 25 * 2**20
"""Bytes of gradients that torch's DistributedDataParallel sends at once: the last ones wait for the backward's end."""
CLEAR = 1.1
"""Times as quick as the pipeline from which another way is called the better tool: predictions err by less."""


@dataclass(frozen=True)
class Way:
    """One way to train, for the rows of the plan's step."""

    name: str
    step_time: float
    memory: int
    """Of the rank that needs most."""
    fits: bool
    note: str


def compare(names: Sequence[str], profile: Profile, machine: Machine, num_units: int) -> list[Way]:
    """Each of ``names`` for ``num_units`` units of the profile's microbatch, over all ranks of the machine."""
    check_names(names)
    return [WAYS[name](profile, machine, num_units) for name in names]


def check_names(names: Sequence[str]) -> None:
    """Refuse a way that is not known, before anything is measured for it."""
    for name in names:
        if name not in WAYS:
            raise UserError(f"--against {name!r} is unknown{nearest(name, WAYS)}; it is one of {', '.join(WAYS)}")


def _single(profile: Profile, machine: Machine, num_units: int) -> Way:
    """The fastest of the ranks alone."""
    ranks = machine.on(profile, [[rank] for rank in range(machine.num_ranks)])
    rank = min(range(machine.num_ranks), key=lambda rank: (_work(ranks[rank]), -machine.memory[rank]))
    time = num_units * _work(ranks[rank]) + _update(ranks[rank])
    memory = _states(profile) + _saved(profile)
    return Way("single", time, memory, memory <= machine.memory[rank], "one device, nothing to send")


def _ddp(profile: Profile, machine: Machine, num_units: int) -> Way:
    ranks = range(machine.num_ranks)
    share = math.ceil(num_units / machine.num_ranks)
    (slowest,) = machine.on(profile, [ranks])
    size = sum(layer.parameter_bytes for layer in profile.layers)
    reduce = machine.reduce_time(profile, ranks, size)
    late = reduce * min(1.0, DDP_BUCKET / size) if size else 0.0
    backward = sum(layer.input_grad + layer.weight_grad for layer in slowest.layers)
    before = share * _work(slowest) - backward
    exposed = max(0.0, reduce - late - backward) + late
    if profile.replica_overhead_per_byte:
        exposed = reduce + profile.replica_overhead + profile.replica_overhead_per_byte * size
    time = before + backward + exposed + _update(slowest)
    memory = _states(profile) + size + _saved(profile)
    note = f"gradients cross the links in {format_seconds(reduce)}; {format_seconds(exposed)} are added to the work"
    return Way("ddp", time, memory, memory <= min(machine.memory), note)


def _fsdp(profile: Profile, machine: Machine, num_units: int) -> Way:
    """In as few rounds as fit: each gathers all weights anew."""
    n = machine.num_ranks
    share = math.ceil(num_units / n)
    fixed = _states(profile) // n + 3 * max((layer.parameter_bytes for layer in profile.layers), default=0)
    best: Way | None = None
    for rounds in range(1, share + 1):
        units = math.ceil(share / rounds)
        memory = fixed + units * _saved(profile)
        fits = memory <= min(machine.memory)
        if not fits and rounds < share:
            continue
        one = round_time(profile, machine, units)
        time = rounds * one + _update(machine.on(profile, [range(n)])[0]) / n
        sent = 3 * rounds * sum(_gather(profile, machine, layer) for layer in profile.layers)
        best = Way("fsdp", time, memory, fits, f"{format_seconds(sent)} of weights and gradients cross the links")
        break
    assert best is not None, "the last number of rounds is always an answer"
    return best


def round_time(profile: Profile, machine: Machine, units: int) -> float:
    """A forward and a backward over ``units`` units at once, weights gathered one layer ahead of the compute."""
    (slowest,) = machine.on(profile, [range(machine.num_ranks)])
    gathers = [_gather(profile, machine, layer) for layer in profile.layers]
    if profile.shard_overhead:
        own = profile.shard_overhead * profile.num_layers
        own += profile.shard_overhead_per_byte * sum(layer.parameter_bytes for layer in profile.layers)
        return units * _work(slowest) + 3 * sum(gathers) + own
    back = range(len(gathers) - 1, -1, -1)
    turns = [(i, slowest.layers[i].forward, False) for i in reversed(back)]
    turns += [(i, slowest.layers[i].input_grad + slowest.layers[i].weight_grad, True) for i in back]
    link = gathered = gathers[0]
    compute = 0.0
    for turn, (i, work, is_backward) in enumerate(turns):
        begun = max(compute, gathered)
        compute = begun + units * work
        if turn + 1 < len(turns):
            link = gathered = max(link, begun) + gathers[turns[turn + 1][0]]
        if is_backward:
            link = max(link, compute) + gathers[i]  # its gradients, scattered
    return max(link, compute)


def _gather(profile: Profile, machine: Machine, layer: LayerCost) -> float:
    """Half of a reduction: each rank's part goes round once."""
    return machine.reduce_time(profile, range(machine.num_ranks), layer.parameter_bytes) / 2


def _work(profile: Profile) -> float:
    return sum(layer.total for layer in profile.layers)


def _update(profile: Profile) -> float:
    return sum(layer.update for layer in profile.layers)


def _saved(profile: Profile) -> int:
    return sum(layer.saved_bytes for layer in profile.layers)


def _states(profile: Profile) -> int:
    """Weights, gradients, optimizer."""
    return sum(2 * layer.parameter_bytes + layer.optimizer_bytes for layer in profile.layers)


WAYS = {"single": _single, "ddp": _ddp, "fsdp": _fsdp}


def verdict(ways: Sequence[Way], step_time: float) -> str:
    """Plainly: is a pipeline the right tool?"""
    fitting = [way for way in ways if way.fits]
    if not fitting:
        names = " and ".join(way.name for way in ways)
        return f"only the pipeline fits: {names} need more memory than a rank has"
    best = min(fitting, key=lambda way: way.step_time)
    ratio = step_time / best.step_time if best.step_time else math.inf
    if ratio >= CLEAR:
        return (
            f"a pipeline is the wrong tool here: {best.name} is predicted to be {ratio:.2f} times as quick, "
            f"and fits ({best.note})"
        )
    if ratio > 1 / CLEAR:
        return f"{best.name} and the pipeline are predicted to be about as quick ({ratio:.2f}): take the simpler one"
    return f"the pipeline is predicted to be {1 / ratio:.2f} times as quick as {best.name}, the next best that fits"


def table(ways: Sequence[Way], step_time: float, cap: float) -> str:
    """All ways beside the plan."""
    rows = [("way", "step", "of the pipeline's", "memory", "")]
    for way in ways:
        size = format_bytes(way.memory) + ("" if way.fits else f", more than {format_bytes(cap)}")
        share = f"{way.step_time / step_time:.2f}" if step_time else "-"
        rows.append((way.name, format_seconds(way.step_time), share, size, way.note))
    return align(rows, left={0, 3, 4}) + f"\n{verdict(ways, step_time)}"
