"""What to tell a person: why a plan is not faster, or what would make one fit."""

from __future__ import annotations

from dataclasses import replace

from vpipe.errors import UserError
from vpipe.plan.bounds import Options
from vpipe.plan.costs import Profile
from vpipe.plan.layout import Layout
from vpipe.plan.memory import Choice
from vpipe.plan.predict import Machine, Pipe, Prediction, stage_facts
from vpipe.plan.shortfall import Shortfall, shortfall
from vpipe.plan.units import format_bytes, format_seconds


def explain_limit(profile: Profile, layout: Layout, prediction: Prediction) -> str:
    """What keeps the plan from being faster."""
    stage = max(range(layout.num_stages), key=lambda s: prediction.stage_times[s])
    time = prediction.stage_times[stage]
    links = {cut: profile.link_time(cut) for cut in layout.cuts[1:-1]}
    if links and max(links.values()) > time:
        cut = max(links, key=lambda c: links[c])
        return f"the link before layer {cut}, which is busy {format_seconds(links[cut])} for each microbatch"
    again, swapped = layout.layers(stage, Choice.RECOMPUTE), layout.layers(stage, Choice.SWAP)
    if swapped and profile.swap_bandwidth:
        lane = 2 * sum(profile.layers[i].saved_bytes for i in swapped) / profile.swap_bandwidth
        if lane >= time * (1 - 1e-9):
            return f"the swap lane of stage {stage}, which takes {format_seconds(lane)} for each microbatch"
    if again:
        extra = sum(profile.layers[i].forward for i in again)
        return (
            f"memory: stage {stage} recomputes {len(again)} of {layout.counts[stage]} layers, "
            f"{format_seconds(extra)} of its {format_seconds(time)}"
        )
    elsewhere = [s for s in range(layout.num_stages) if layout.layers(s, Choice.RECOMPUTE)]
    if elsewhere:
        names = ", ".join(map(str, elsewhere))
        noun = "stage" if len(elsewhere) == 1 else "stages"
        return f"memory: {noun} {names} must recompute, which leaves {format_seconds(time)} of work to stage {stage}"
    if layout.counts[stage] == 1:
        name = profile.layers[layout.cuts[stage]].name
        return f"one layer: {name} alone is stage {stage} and takes {format_seconds(time)}"
    return f"compute: stage {stage} takes {format_seconds(time)} for each microbatch"


class Infeasible(UserError):
    """The question was right; the answer is that nothing fits."""

    exit_code = 1


class Misfit(Infeasible):
    """A model that fits under no plan of a schedule. ``explained`` looks for remedies, which takes a moment."""

    def __init__(self, profile: Profile, pipe: Pipe, machine: Machine, options: Options) -> None:
        super().__init__(f"no plan of {pipe.entry.name} on {pipe.num_ranks} ranks fits into memory")
        self._problem = profile, pipe, machine, options
        self._short = _short(*self._problem)

    @property
    def missing(self) -> tuple[int, float]:
        """Stages per rank, then bytes: misfits are compared by this, since several stages share their rank's memory."""
        return self._problem[1].stages_per_rank, self._short.missing

    def explained(self) -> Infeasible:
        """The error with the numbers: how many bytes, which stage, and what would fit."""
        profile, pipe, machine, options = self._problem
        short = self._short
        start, stop = short.cuts[short.stage], short.cuts[short.stage + 1] - 1
        cap = machine.memory[pipe.program.placement.ranks_of[short.stage][0]] / pipe.stages_per_rank
        means = {"recomputing": options.recompute, "swapping": options.swap}
        used = " and ".join(name for name, allowed in means.items() if allowed)
        remedies = []
        if (ranks := _enough_ranks(*self._problem)) is not None:
            remedies.append(f"{ranks} ranks")
        if (rows := _fitting_rows(*self._problem)) is not None:
            remedies.append(f"microbatches of {rows} instead of {profile.microbatch_rows} rows")
        remedy = f"it would fit with {' or with '.join(remedies)}" if remedies else "it needs ranks with more memory"
        return Infeasible(
            f"no plan of {pipe.entry.name} on {pipe.num_ranks} ranks fits: stage {short.stage} (layers {start} to "
            f"{stop}) is short by {format_bytes(short.missing)} ({short.missing:.0f} bytes) of {format_bytes(cap)}"
            f"{f' with {used} wherever it helps' if used else ''}; {remedy}"
        )


def _short(profile: Profile, pipe: Pipe, machine: Machine, options: Options) -> Shortfall:
    return shortfall(profile, stage_facts(pipe.program, machine, 1.0 / pipe.stages_per_rank), options)


def _enough_ranks(profile: Profile, pipe: Pipe, machine: Machine, options: Options) -> int | None:
    """The smallest number of equal ranks that would do: doubled until it fits, then halved down."""
    if len(set(machine.memory)) > 1 or len(set(machine.speed)) > 1:
        return None
    most = profile.num_layers // pipe.stages_per_rank

    def fits(ranks: int) -> bool:
        more = Machine((machine.memory[0],) * ranks, (machine.speed[0],) * ranks)
        try:
            return _short(profile, replace(pipe, num_ranks=ranks), more, options).missing <= 0
        except UserError:
            return False

    step, low = 1, pipe.num_ranks
    while low < most:
        high = min(low + step, most)
        if fits(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if fits(middle) else (middle, high)
            return high
        low, step = high, step * 2
    return None


def _fitting_rows(profile: Profile, pipe: Pipe, machine: Machine, options: Options) -> int | None:
    """The largest microbatch that would do."""
    low, high = 0, profile.microbatch_rows
    while high - low > 1:
        middle = (low + high) // 2
        fits = _short(profile.scaled(middle), pipe, machine, options).missing <= 0
        low, high = (middle, high) if fits else (low, middle)
    return low or None
