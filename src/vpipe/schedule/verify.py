"""Whether a program is right, before anything runs.

``verify`` returns every violation, not the first: what is missing, what comes twice, what stands on the wrong rank or
in the wrong order, sends and receives that do not match, a deadlock under the chosen transport, memory beyond a bound,
and updates that lose or mix gradients. What each action must keep, and who meets whom, is in ``laws``; what hangs, the
event loop of ``timeline`` tells; what becomes of weights, ``updates``. ``executable`` gives the runtime what it runs:
no program gets there unverified.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache

from vpipe.errors import UserError
from vpipe.schedule import laws, updates
from vpipe.schedule.action import Action, Kind
from vpipe.schedule.flat import collector_paused
from vpipe.schedule.lower import agree, communicate, is_lowered, lower, reduce, send_ahead
from vpipe.schedule.program import Program
from vpipe.schedule.semantics import COMMUNICATION, MEETINGS, NEEDS, peers
from vpipe.schedule.simulate import simulate
from vpipe.schedule.timeline import LinkModel, never_waits, run, usual
from vpipe.schedule.violation import Violation, folded


def verify(
    program: Program,
    *,
    transport: LinkModel = LinkModel.RENDEZVOUS,
    max_activations: float | None = None,
) -> list[Violation]:
    """Every violation, in the order of ranks and actions; none: the program runs and computes the right thing.

    A program that says nothing of communication is completed by lowering first. The index of a violation counts the
    actions of the program as it was given. What makes other checks meaningless ends the search.
    """
    with collector_paused():
        return _verify(program, transport, max_activations)


def executable(
    program: Program,
    name: str,
    *,
    recompute_stages: Collection[int] = (),
    swap_stages: Collection[int] = (),
    agrees: bool = False,
    early_reduction: bool = False,
) -> Program:
    """What ranks run of a program called ``name``: lowered unless it is, with the agreement of a synchronous one, and
    verified; a ``UserError`` where it cannot be run."""
    if is_lowered(program):
        _check_lowered(program, {Kind.R: recompute_stages, Kind.OUT: swap_stages})
    else:
        program = lower(program, recompute_stages=recompute_stages, swap_stages=swap_stages)
    if agrees:
        program = agree(program)
        program = send_ahead(program) if early_reduction else program
    if violations := _known(program):
        kinds = "; ".join(map(str, folded(violations)[:3]))
        raise UserError(f"{name} is not a valid program: {kinds} ({len(violations)} in all; 'vpipe verify' lists them)")
    return program


@lru_cache(maxsize=64)
def _known(program: Program) -> tuple[Violation, ...]:
    return tuple(verify(program))


def _check_lowered(program: Program, wanted: Mapping[Kind, Collection[int]]) -> None:
    """A program that says all itself must also say what is recomputed and swapped."""
    has = {(action.kind, action.stage) for _, action in program.actions()}
    for kind, stages in wanted.items():
        for stage in sorted(stages):
            if (kind, stage) not in has:
                option = "recompute" if kind is Kind.R else "swap"
                raise UserError(
                    f"{option} names layers of stage {stage}, but the lowered program has no {kind} there; "
                    "give the program without communication, which is then lowered here, or add those actions"
                )


def _verify(program: Program, transport: LinkModel, max_activations: float | None) -> list[Violation]:
    flat, places = program.flat, laws.Places(program)
    strangers = [*laws.strangers(flat)]
    twice = [*laws.duplicates(flat)]
    found = [*strangers, *twice, *laws.incomplete(flat)]
    if strangers:
        return sorted(set(found))
    lowered = is_lowered(program)
    found += updates.violations(program, lowered)
    executable = program if lowered else communicate(reduce(program))
    unmatched = [*laws.unmatched(executable.flat, places)]
    unmet = [*laws.unmet_needs(executable.flat, places)]
    if twice and not lowered:  # between which of the two a message is added is nobody's fault
        unmet = [each for each in unmet if each.index >= 0]
    found += [*unmet, *unmatched]
    found += [] if unmatched else laws.crossed(executable.flat, places)
    found += laws.missed_meetings(executable, program)
    found += laws.lost_swaps(flat)
    if not found:
        found += _deadlock(executable, program, transport, places)
    if not found and max_activations is not None:
        found += _too_much(executable, max_activations)
    return sorted(set(found))


def _deadlock(program: Program, given: Program, transport: LinkModel, places: laws.Places) -> Iterator[Violation]:
    """What every rank waits for when none can go on. Sends block, as the strictest transport's do."""
    if never_waits(usual(program)):
        return
    timeline = run(program, transport=transport, blocking_sends=True)
    for event in timeline.stuck:
        action, rank = timeline.flat.action(event), int(timeline.flat.rank[event])
        if action.kind in MEETINGS:
            yield laws.deadlock_at_meeting(timeline, given, event, f"deadlock under {transport}")
            continue
        if action.kind in COMMUNICATION:
            waits = f"{Action(peers(program, action)[0], laws.RECEIVE_OF[action.kind], action.microbatch)} to be posted"
        else:
            waits = f"what {_waits_for(action)} to arrive"
        yield places.at(action, rank, f"deadlock under {transport}: waits for ever for {waits}")


def _waits_for(action: Action) -> str:
    kinds = [need.received_by for need in NEEDS[action.kind] if need.received_by]
    return (
        " and ".join(f"{action.stage}{kind}{action.microbatch} brings" for kind in kinds) or "its rank is waiting for"
    )


def _too_much(program: Program, bound: float) -> Iterator[Violation]:
    for rank, peak in enumerate(simulate(program).peak_activations):
        if peak > bound + 1e-9:
            yield Violation(
                rank, -1, "", f"holds the activations of {peak:g} microbatches, more than the bound of {bound:g}"
            )
