"""The first lines of a page: what costs most, and what to do about it.

What costs most is the largest cause of idle time over all ranks (``bubbles``). Remedies are tried, not guessed: the
planner predicts the run as it is and as it would be, both from this run's own measured costs, and the best remedy is
named with its predicted gain. Nothing is recommended that gains less than ``WORTH``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from vpipe.errors import UserError
from vpipe.observe import estimate
from vpipe.observe.bubbles import CAUSES, attribute, medians
from vpipe.observe.measured import Measured
from vpipe.observe.timelines import typical
from vpipe.plan.costs import Profile
from vpipe.rundir.layout import CONFIG
from vpipe.rundir.reader import RunDirectory
from vpipe.schedule import catalog

WORTH = 1.02
LITTLE = 0.05
"""A bubble below which there is nothing to say."""
CANDIDATES = ("1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-v", "looped-bfs")
MAX_ACTIONS = 6000
"""Actions of a program that is tried while a page is waited for."""


@dataclass(frozen=True)
class Remedy:
    """A change, in words and as a command, and how many times faster the planner predicts it."""

    words: str
    command: str
    gain: float


def verdict(run: RunDirectory, steps: Sequence[Measured]) -> dict[str, Any] | None:
    """``says`` in one or two sentences, and the remedy behind it; ``None`` where no step is recorded."""
    if not steps:
        return None
    chosen = typical(steps)
    bubbles = [attribute(step) for step in chosen.steps]
    *by_rank, (busy, *causes) = medians(bubbles)
    shares, idle = dict(zip(CAUSES, causes, strict=True)), 1 - busy
    worst = max(shares, key=lambda cause: shares[cause])
    found: dict[str, Any] = {"cause": worst, "bubble": idle, "remedy": None}
    if idle < LITTLE:
        return found | {"cause": None, "says": f"All ranks work {1 - idle:.0%} of the step: there is little to gain."}
    crowded = _crowded(run, shares["cores"])
    if crowded or worst == "cores":  # what these ranks would take with a core each was not measured
        return found | {"cause": "cores", "says": crowded or _what("cores", shares["cores"], run, by_rank)}
    says = _what(worst, shares[worst], run, by_rank)
    simulation = chosen.simulation
    profile = estimate.profile_of(run, simulation.costs) if simulation else None
    best = max(_tried(run, profile), key=lambda each: round(each.gain, 2), default=None) if profile else None
    if best is None or best.gain < WORTH or worst == "data":  # another schedule does not read sooner
        return found | {"says": f"{says} {_plain(worst, shares[worst])}".strip()}
    remedy = {"words": best.words, "command": best.command, "gain": best.gain}
    return found | {"says": f"{says} {best.words}", "remedy": remedy}


def _crowded(run: RunDirectory, share: float) -> str:
    """The sentence where ranks wait because rank 0's machine has fewer cores than ranks; empty where it has enough."""
    hosts, cores = run.facts.hosts or (), run.facts.cores
    ranks = hosts.count(hosts[0]) if hosts else run.num_ranks
    if cores is None or ranks <= cores or share < LITTLE:
        return ""
    return (
        f"More ranks than cores: {ranks} ranks on {cores} cores wait {share:.0%} of their time for one. Train with "
        f"{cores} ranks, or where each has a core; until then another schedule or cut cannot be judged."
    )


def _what(cause: str, share: float, run: RunDirectory, by_rank: Sequence[Sequence[float]]) -> str:
    """The sentence about what costs most."""
    busy = [row[0] for row in by_rank]
    low, high = min(range(len(busy)), key=busy.__getitem__), max(range(len(busy)), key=busy.__getitem__)
    if cause == "imbalance":
        held = run.program.placement.stages_of[high]
        name = f"stage {held[0]}" if len(held) == 1 else f"its stages {' '.join(map(str, held))}"
        times = busy[high] / mean(busy) if mean(busy) else 1.0
        return (
            f"Rank {low} waits {1 - busy[low]:.0%} of the step, because rank {high} sets the pace: {name} works "
            f"{times:.2f} times as long as the mean."
        )
    sentences = {
        "warmup_drain": f"The schedule {run.schedule} itself idles {share:.0%} of the ranks' time: the pipe "
        "fills and drains in every step.",
        "communication": f"Messages cost {share:.0%} of the ranks' time.",
        "data": f"The ranks wait {share:.0%} of the time for data, or between two steps.",
        "overhead": f"The runtime itself takes {share:.0%} of the ranks' time: the actions are short.",
        "cores": f"The ranks wait {share:.0%} of their time for a core, though there is one for each: something else "
        "runs on this machine, or each rank computes with several threads (launch.threads).",
    }
    return sentences[cause]


def _plain(cause: str, share: float) -> str:
    """A remedy that no simulation of the pipeline can price: at most its whole share is gained."""
    most = f"at most {1 / (1 - share):.2f}×"
    return {
        "data": f"More dataset.num_workers, or a quicker disk, may gain {most}.",
        "overhead": f"Larger microbatches may gain {most}.",
        "communication": f"A quicker link may gain {most}.",
    }.get(cause, "No other cut or schedule is predicted to be quicker.")


def _cut(counts: Sequence[int]) -> str:
    """Stages, in layers."""
    if len(set(counts)) == 1:
        return f"{len(counts)} stages of {counts[0]} layer" + "s" * (counts[0] > 1)
    return f"stages of {' '.join(map(str, counts))} layers"


def _tried(run: RunDirectory, profile: Profile) -> Iterator[Remedy]:
    """What the planner predicts for a better cut, another schedule, smaller microbatches."""
    units = run.num_microbatches
    try:
        now = estimate.present(profile, run).step_time
        synchronous = not catalog.get(run.schedule).asynchronous
    except UserError:
        return
    config = run.path / CONFIG
    base = f"vpipe plan {config} -p {run.num_ranks} -m {units}"
    names = [run.schedule, *(name for name in CANDIDATES if synchronous and name != run.schedule)]
    for name in names:
        per_rank = catalog.get(name).stages_per_rank
        if 4 * run.num_ranks * units * per_rank > MAX_ACTIONS:
            continue
        try:
            same = name == run.schedule
            found = estimate.candidate(profile, run, **({} if same else {"schedule": name}))
        except UserError:
            continue
        gain = now / found.step_time if found.step_time else 1.0
        cut = _cut(found.layout.counts)
        words = (
            f"{'Cut into' if same else f'By {name}, cut into'} {cut}, a step is predicted to be {gain:.2f}× as fast."
        )
        yield Remedy(words, f"{base} --scheduler {name}", gain)
