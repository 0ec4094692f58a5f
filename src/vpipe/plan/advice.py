"""What to tell a person: why a plan is not faster, or what would make one fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vpipe.errors import UserError
from vpipe.plan.costs import Profile
from vpipe.plan.judge import Judge
from vpipe.plan.layout import PlannedLayout
from vpipe.plan.limits import Limits
from vpipe.plan.memory import Choice, Options
from vpipe.plan.packing import Packer
from vpipe.plan.predict import Machine, Pipe, Prediction
from vpipe.plan.shortfall import shortfall
from vpipe.plan.starts import least_overflow
from vpipe.plan.units import format_bytes, format_seconds


def explain_limit(profile: Profile, layout: PlannedLayout, prediction: Prediction, pipe: Pipe, machine: Machine) -> str:
    """What keeps the plan from being faster."""
    stage = max(range(layout.num_stages), key=lambda s: prediction.stage_times[s])
    time = prediction.stage_times[stage]
    ranks = pipe.program.placement.ranks_of
    links = {
        cut: max(profile.cut_bytes[cut], profile.back_bytes[cut])
        * machine.seconds_per_byte(profile, ranks[s], ranks[s + 1])
        for s, cut in enumerate(layout.cuts[1:-1])
    }
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

    def __init__(self, profile: Profile, pipe: Pipe, machine: Machine, options: Options, limits: Limits) -> None:
        super().__init__(f"no plan of {pipe.entry.name} on {pipe.num_ranks} ranks fits into memory")
        self._problem = profile, pipe, machine, options, limits
        self._short = missing(*self._problem)

    @property
    def missing(self) -> float:
        """Bytes: misfits are compared by this."""
        return self._short.size

    def explained(self) -> Infeasible:
        """The error with the numbers: how many bytes, where, and what would fit."""
        profile, pipe, _, options, limits = self._problem
        short = self._short
        means = {"recomputing": options.recompute, "swapping": options.swap}
        used = " and ".join(name for name, allowed in means.items() if allowed)
        remedies = []
        if (ranks := _enough_ranks(*self._problem)) is not None:
            remedies.append(f"{ranks} ranks")
        if (rows := _fitting_rows(*self._problem)) is not None:
            remedies.append(f"microbatches of {rows} instead of {profile.microbatch_rows} rows")
        remedy = f"it would fit with {' or with '.join(remedies)}" if remedies else "it needs ranks with more memory"
        if limits.over:
            remedy += " (the time limit ended the search; with a larger --time-limit more is tried)"
        found = "fits" if short.proven else "was found that fits (not every partition was tried)"
        return Infeasible(
            f"no plan of {pipe.entry.name} on {pipe.num_ranks} ranks {found}: {short.place} is short by "
            f"{format_bytes(short.size)} ({short.size:.0f} bytes) of {format_bytes(short.cap)}"
            f"{f' with {used} wherever it helps' if used else ''}; {remedy}"
        )


@dataclass(frozen=True)
class Missing:
    """What the best partition lacks, where; ``proven`` if no other lacks less. ``size`` is 0 or less if all fit."""

    size: float
    place: str
    cap: float
    proven: bool = True


def missing(profile: Profile, pipe: Pipe, machine: Machine, options: Options, limits: Limits) -> Missing:
    """By how much memory is short. Several stages share their rank's memory, so there a rank is short, not a stage."""
    if pipe.num_stages > profile.num_layers:
        raise UserError(f"{pipe.num_stages} stages for {profile.num_layers} layers")
    judge = Judge(profile, pipe, machine)
    if pipe.stages_per_rank == 1:
        facts = [site.facts for site in judge.sites]
        short = shortfall(judge.profile, facts, options)
        layers = f"layers {short.cuts[short.stage]} to {short.cuts[short.stage + 1] - 1}"
        return Missing(short.missing, f"stage {short.stage} ({layers})", facts[short.stage].memory)
    packer = Packer(judge, options)
    size, group, proven = least_overflow(judge, packer, limits)
    return Missing(size, f"the rank of stages {', '.join(map(str, packer.groups[group]))}", packer.caps[group], proven)


def _enough_ranks(profile: Profile, pipe: Pipe, machine: Machine, options: Options, limits: Limits) -> int | None:
    """The smallest number of equal ranks that would do: doubled until it fits, then halved down."""
    if not machine.alike or pipe.replicas:
        return None
    most = profile.num_layers // pipe.stages_per_rank

    def fits(ranks: int) -> bool:
        more = Machine.of(ranks, machine.memory[0])  # speeds change no bytes
        try:
            return missing(profile, replace(pipe, num_ranks=ranks), more, options, limits).size <= 0
        except UserError:
            return False

    step, low = 1, pipe.num_ranks
    while low < most and not limits.over:
        high = min(low + step, most)
        if fits(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if fits(middle) else (middle, high)
            return high
        low, step = high, step * 2
    return None


def _fitting_rows(profile: Profile, pipe: Pipe, machine: Machine, options: Options, limits: Limits) -> int | None:
    """The largest microbatch that would do."""
    low, high = 0, profile.microbatch_rows
    while high - low > 1 and not limits.over:
        middle = (low + high) // 2
        fits = missing(profile.scaled(middle), pipe, machine, options, limits).size <= 0
        low, high = (middle, high) if fits else (low, middle)
    return low or None
