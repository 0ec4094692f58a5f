"""Every two features meet, and random cases beyond them, each beside plain torch; ``cases.py`` has the table.

The fast core runs a part of the covering cases, drawn by ``VPIPE_TEST_SEED``; ``-m slow`` all of them, processes too.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import cases
import mutants
import pytest

HOUR = os.environ.get("VPIPE_TEST_SEED", "0")
SEED = int(HOUR) if HOUR.isdigit() else 0
GROUPS = 12
FAST = 20
"""Covering cases of the fast core."""


def wrong(chosen: list[cases.Case]) -> str:
    """The first case that is wrong, as its smallest program."""
    return next((cases.told(case) for case in chosen if cases.check(case)), "")


ONCE_WRONG = [
    *(
        f"{holders} {words}"
        for holders in ("replicas=2", "schedule=chimera")
        for words in (
            "hook=tensor",
            "teacher=True evaluates=True",
            "rates=True",
            "teacher=True moves=ranks",
            "frozen=turns",
        )
    ),
    "schedule=pipedream clip=0.05",
    "schedule=pipedream-2bw optimizer=adam memory=swap",
    "schedule=zb-v tie=declared clip=0.05 rows=uneven autocast=True scale=8.0",
    "schedule=hanayo norm=batch dropout=True memory=recompute moves=counts",
    "memory=recompute inplace=view",
    "memory=recompute generator=torch",
    "norm=read",
    "skip=residual ranks=4",
    "skip=alias ranks=4",
    "rates=True moves=counts",
    "schedule=zb-h1 hook=accumulated function=own skip=direct",
]
"""What sessions have found, at its smallest."""


@pytest.mark.parametrize("words", ONCE_WRONG)
def test_what_was_once_wrong(words: str) -> None:
    assert not wrong([cases.parsed(words.split())])


def test_every_value_alone_and_every_refusal() -> None:
    """A row of the table that no case can have, or a refusal that is no longer true, is noticed here."""
    alone = [cases.complete({name: value}) for name, values in cases.FEATURES.items() for value in values[1:]]
    refused = [
        "schedule=pipedream tie=declared",
        "schedule=pipedream accumulate=2",
        "numbers=True",
        "generator=torch replicas=2",
    ]
    expected = [cases.parsed(words.split()) for words in refused]
    assert all(cases.expectation(case) for case in expected)
    assert not wrong(
        [
            case
            for case in (*alone, *expected)
            if not cases.impossible(case) and not any(case[each] for each in cases.ELSEWHERE)
        ]
    )


def test_the_covering_cases_have_every_pair() -> None:
    met = {pair for case in cases.covering(SEED, cases.ELSEWHERE) for pair in cases.combinations(case.items(), 2)}
    assert cases.pairs() <= met


def test_a_part_of_the_covering_cases() -> None:
    chosen = list(cases.covering(SEED))
    assert not wrong(random.Random(SEED).sample(chosen, FAST))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", range(GROUPS))
def test_all_pairs(group: int) -> None:
    assert not wrong(list(cases.covering(SEED, elsewhere=["processes"]))[group::GROUPS])


@pytest.mark.parametrize("words", ["", "schedule=zb-v norm=batch dropout=True", "replicas=2 tie=declared clip=0.05"])
def test_ranks_that_are_processes(words: str) -> None:
    assert not wrong([cases.parsed(["processes=True", *words.split()])])


def test_every_mutant_has_its_place() -> None:
    """``mutants.py`` runs them; a change of the source that takes a place away is noticed here."""
    for name in (*mutants.names(), *mutants.recipe_mutants.names()):
        file, old, _ = mutants.mutant(name)
        assert (mutants.SOURCE / "vpipe" / file).read_text().count(old) == 1, name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.rotates(2)
@pytest.mark.parametrize("name", mutants.names())
def test_the_table_kills_mutants(name: str) -> None:
    assert name in mutants.EQUIVALENT or mutants.main([name]) == 0


def test_a_failing_case_shrinks_to_a_program_that_runs_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A planted bug: a swapped tensor comes back as another one. Of nine features one is left."""
    from vpipe.runtime.memory.saved_tensors import SavedTensor

    found = SavedTensor.get
    monkeypatch.setattr(SavedTensor, "get", lambda self: found(self) * 1.01)
    words = (
        "memory=swap clip=0.05 optimizer=adam rows=uneven accumulate=2 evaluates=True hook=tensor teacher=True ranks=4"
    )
    told = cases.told(cases.parsed(words.split()))
    head, said, _, *program = told.splitlines()
    assert head == "python tests/pairs/cases.py memory=swap"
    assert "WRONG: " in said
    script = tmp_path / "case.py"
    script.write_text("\n".join(program))
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, script], cwd=root, capture_output=True, text=True, timeout=100)
    assert done.stdout == "equal\n", done.stderr  # without the planted bug
