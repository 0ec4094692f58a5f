"""verify against a judge: of random mutants, it rejects those that change what is computed, and only those.

The judge (``schedule_oracle``) runs original and mutant on symbols. A mutant is *changed* if it hangs, breaks, or makes
other updates than the original; else it is *alike*. verify, which does not know the original, must object to every
changed mutant and to no mutant that is alike.

    python tests/schedule/test_mutation.py 20000        counts for many mutants
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest
from schedule_oracle import Known, Wrong, meaning

from vpipe.schedule.action import OF_A_STAGE, Action
from vpipe.schedule.catalog import build, entries, find
from vpipe.schedule.lower import agree, is_lowered, lower
from vpipe.schedule.program import Program
from vpipe.schedule.verify import Violation, verify

Rows = list[list[Action]]
Mutation = Callable[[Rows, random.Random, Program], str]


def _pick(rows: Rows, dice: random.Random) -> tuple[int, int]:
    rank = dice.choice([rank for rank, row in enumerate(rows) if row])
    return rank, dice.randrange(len(rows[rank]))


def drop(rows: Rows, dice: random.Random, program: Program) -> str:
    rank, index = _pick(rows, dice)
    return f"drop {rows[rank].pop(index)} at rank {rank}, {index}"


def swap(rows: Rows, dice: random.Random, program: Program) -> str:
    rank, index = _pick(rows, dice)
    row = rows[rank]
    other = dice.choice([max(0, index - 1), dice.randrange(len(row))])
    row[index], row[other] = row[other], row[index]
    return f"swap {row[other]} and {row[index]} at rank {rank}, {index} and {other}"


def duplicate(rows: Rows, dice: random.Random, program: Program) -> str:
    rank, index = _pick(rows, dice)
    place = dice.choice([index, dice.randint(0, len(rows[rank]))])
    rows[rank].insert(place, action := rows[rank][index])
    return f"duplicate {action} at rank {rank}, {place}"


def shift(rows: Rows, dice: random.Random, program: Program) -> str:
    rank, index = _pick(rows, dice)
    action = rows[rank].pop(index)
    place = min(len(rows[rank]), max(0, index + dice.choice([-3, -2, -1, 1, 2, 3, 8])))
    rows[rank].insert(place, action)
    return f"shift {action} at rank {rank} from {index} to {place}"


def move_to_rank(rows: Rows, dice: random.Random, program: Program) -> str:
    rank, index = _pick(rows, dice)
    action = rows[rank].pop(index)
    target = dice.choice([other for other in range(len(rows)) if other != rank])
    rows[target].insert(dice.randint(0, len(rows[target])), action)
    return f"move {action} from rank {rank} to rank {target}"


def change_stage(rows: Rows, dice: random.Random, program: Program) -> str:
    rank, index = _pick(rows, dice)
    before = rows[rank][index]
    stages = [stage for stage in range(program.num_stages + 1) if stage != before.stage]
    here = [stage for stage in program.placement.stages_of[rank] if stage != before.stage]
    rows[rank][index] = after = before._replace(stage=dice.choice(here or stages))
    return f"{before} becomes {after} at rank {rank}, {index}"


def change_microbatch(rows: Rows, dice: random.Random, program: Program) -> str:
    rank, index = _pick(rows, dice)
    before = rows[rank][index]
    if before.kind in OF_A_STAGE:
        return drop(rows, dice, program)
    others = [k for k in range(program.num_microbatches + 1) if k != before.microbatch]
    rows[rank][index] = after = before._replace(microbatch=dice.choice(others))
    return f"{before} becomes {after} at rank {rank}, {index}"


MUTATIONS: tuple[Mutation, ...] = (drop, swap, duplicate, shift, move_to_rank, change_stage, change_microbatch)


@dataclass(frozen=True)
class Verdict:
    story: str
    changed: str
    """Why the judge says so; empty for a mutant that is alike."""
    violations: list[Violation]

    @property
    def agreed(self) -> bool:
        return bool(self.changed) == bool(self.violations)

    def __str__(self) -> str:
        found = "; ".join(map(str, self.violations)) or "nothing"
        return f"{self.story}\n    judge: {self.changed or 'alike'}\n    verify: {found}"


@cache
def _expected(original: Program) -> tuple[Hashable, Known]:
    known: Known = {}
    return meaning(original if is_lowered(original) else lower(original), known), known


def judge(original: Program, mutant: Program) -> str:
    """Why ``mutant`` is not ``original``; empty if it computes the same. Authors' programs are lowered first."""
    expected, known = _expected(original)
    try:
        executable = mutant if is_lowered(original) else lower(mutant)
        return "" if meaning(executable, known) == expected else "other updates"
    except Wrong as wrong:
        return str(wrong)
    except (KeyError, IndexError, AssertionError) as error:  # lowering takes programs whose actions exist
        return f"cannot be lowered: {error!r}"


def verdict(original: Program, mutation: Mutation, dice: random.Random, name: str) -> Verdict | None:
    rows = [list(row) for row in original.rows]
    story = f"{name}: {mutation(rows, dice, original)}"
    mutant = original.with_rows(rows)
    if mutant.rows == original.rows:
        return None
    return Verdict(story, judge(original, mutant), verify(mutant))


def programs() -> Iterator[tuple[str, Program]]:
    """The catalogue as written and as executed, with recompute, swap, replicas, skips, and all versions."""
    authored: dict[str, Program] = {}
    for entry in entries():
        for p, m in ((2, 7), (4 if entry.two_ways else 3, 9), (4, 10)):
            authored[f"{entry.name} p={p} m={m}"] = entry.build(p, m)
    authored["pipedream, vertical sync"] = build("pipedream", 3, 9, vertical_sync=True)
    authored["pipedream, interval 2"] = build("pipedream", 3, 12, update_interval=2)
    authored["pipedream, replicas 2 1"] = build("pipedream", 3, 12, replicas=[2, 1])
    authored["pipedream, replicas 2 2"] = build("pipedream", 4, 12, replicas=[2, 2])
    authored["pipedream-2bw, three batches"] = build("pipedream-2bw", 3, 3, num_batches=3)
    for name, program in authored.items():
        yield name, program
        yield f"{name}, lowered", lower(program)
        if find(program).asynchronous is False:
            yield f"{name}, with an agreement", agree(lower(program))
    for name in ("1f1b p=3 m=9", "zb-h1 p=3 m=9", "zb-v p=3 m=9", "pipedream p=3 m=9"):
        stages = range(authored[name].num_stages)
        yield f"{name}, recompute", lower(authored[name], recompute_stages=stages)
        yield f"{name}, swap", lower(authored[name], swap_stages=stages)
        yield f"{name}, both", lower(authored[name], recompute_stages=stages, swap_stages=stages)
    for name in ("1f1b p=4 m=10", "zb-h1 p=4 m=10", "zb-v p=3 m=9", "hanayo p=3 m=9", "interleaved p=2 m=7"):
        skipping = replace(authored[name], skips=frozenset({(0, 2), (1, 3), (0, 3)}))
        yield f"{name}, skips", skipping
        yield f"{name}, skips, lowered", lower(skipping)
    yield (
        "replicas and a skip",
        lower(replace(build("pipedream", 4, 12, replicas=[2, 1, 1]), skips=frozenset({(0, 2)}))),
    )


def campaign(num_mutants: int, seed: int) -> tuple[Counter[tuple[str, str]], list[Verdict]]:
    """Counts of (mutation, verdict), and the verdicts on which verify and the judge differ."""
    dice = random.Random(seed)
    pool = list(programs())
    counts: Counter[tuple[str, str]] = Counter()
    disputed = []
    for number in range(num_mutants):
        name, program = pool[number % len(pool)]
        mutation = dice.choice(MUTATIONS)
        found = verdict(program, mutation, dice, name)
        if found is not None:
            counts[mutation.__name__, "changed" if found.changed else "alike"] += 1
            if not found.agreed:
                disputed.append(found)
    return counts, disputed


def test_originals_are_valid() -> None:
    for name, program in programs():
        assert not verify(program), name


@pytest.mark.rotates(1)
@pytest.mark.parametrize("seed", range(9))
def test_verify_rejects_exactly_the_mutants_that_change_meaning(seed: int) -> None:
    counts, disputed = campaign(1000, seed)
    totals = Counter(kind for _, kind in counts.elements())
    print(dict(totals))
    assert not disputed, "\n".join(map(str, disputed[:5]))
    assert min(totals["changed"], totals["alike"]) > 50, "too few of one sort to say anything"


if __name__ == "__main__":
    counts, disputed = campaign(
        int(sys.argv[1]) if len(sys.argv) > 1 else 5000, int(sys.argv[2]) if len(sys.argv) > 2 else 0
    )
    print(f"{'mutation':<20}{'changed':>10}{'alike':>10}")
    for mutation in MUTATIONS:
        print(
            f"{mutation.__name__:<20}{counts[mutation.__name__, 'changed']:>10}{counts[mutation.__name__, 'alike']:>10}"
        )
    accepted, refused = (sum(bool(each.changed) is kind for each in disputed) for kind in (True, False))
    print(f"{counts.total()} mutants; changed but accepted: {accepted}; alike but rejected: {refused}")
    print("\n".join(map(str, disputed[:40])))
