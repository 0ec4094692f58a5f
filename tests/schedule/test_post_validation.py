"""Updates that are agreed on afterwards: the time of a batch is the maxspan, and what may stand before the agreement."""

from __future__ import annotations

import pytest

from vpipe.errors import UserError
from vpipe.schedule.action import Kind
from vpipe.schedule.authors.authoring import POST_VALIDATION, Chain
from vpipe.schedule.catalog import build, entries, get
from vpipe.schedule.lower import agree, lower
from vpipe.schedule.program import Program, from_csv, to_csv
from vpipe.schedule.semantics import agrees_after, update_groups, version_table
from vpipe.schedule.simulate import simulate
from vpipe.schedule.verify import verify


def afterwards(name: str, p: int, m: int, batches: int) -> Program:
    return build(name, p, m, post_validation=True, num_batches=batches)


@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 3), (3, 1), (3, 5), (4, 8), (5, 9), (6, 12)])
def test_a_batch_takes_its_maxspan(name: str, p: int, m: int) -> None:
    """The zero-bubble papers' promise. Agreed on before each update, a batch takes the makespan."""
    one = simulate(build(name, p, m))
    short, long = (simulate(afterwards(name, p, m, count)) for count in (3, 4))
    assert long.makespan - short.makespan == pytest.approx(one.maxspan)
    assert long.peak_activations == one.peak_activations
    assert long.weight_versions == one.weight_versions
    assert long.staleness == one.staleness


@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
def test_it_verifies_lowered_and_read_back(name: str) -> None:
    program = afterwards(name, 4, 8, 3)
    lowered = lower(program)
    for each in (program, lowered, lower(program, recompute_stages=[0, 1]), from_csv(to_csv(lowered))):
        assert not verify(each)
        assert agrees_after(each)
    assert agree(lowered) == lowered
    assert not agrees_after(agree(lower(build(name, 4, 8))))
    assert version_table(program)[0, 8] == 1
    assert update_groups(program)[0] == [list(range(begin, begin + 8)) for begin in (0, 8, 16)]


def test_only_schedules_that_gain_have_the_option() -> None:
    having = [entry.name for entry in entries() if POST_VALIDATION in entry.options]
    gaining = [
        entry.name
        for entry in entries()
        if not entry.asynchronous and (found := simulate(entry.build(4, 8))).maxspan < found.makespan
    ]
    assert having == gaining == ["zb-h2", "zb-v"]
    assert get("zb-h2").chains_with({}) is Chain.NOT
    assert get("zb-h2").chains_with({POST_VALIDATION: True}) is Chain.BATCHES
    with pytest.raises(UserError, match="1f1b has no option 'post_validation'"):
        afterwards("1f1b", 4, 8, 2)


MESSAGE = "is on its way to 1F4 while the ranks agree on an update: if that is taken back, it would be sent twice"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            ("0STEP,0F4,0AGREE", "0STEP,0F4"),
            "(0STEP): updates before the ranks have agreed on the update before",
        ),
        (("0F4,0AGREE,0SEND_F4", "0F4,0SEND_F4,0AGREE"), MESSAGE),
        (("1AGREE,1RECV_F4", "1RECV_F4,1AGREE"), MESSAGE),
        (("1AGREE,1RECV_F4", "1AGREE,1AGREE,1RECV_F4"), "agrees on no update"),
        (("0W3,0STEP", "0STEP,0W3"), "stands between an update and the agreement on it, where only forwards may"),
    ],
)
def test_what_may_not_stand_before_the_agreement(changed: tuple[str, str], words: str) -> None:
    text = to_csv(lower(afterwards("zb-h2", 2, 4, 2)))
    assert not verify(from_csv(text))
    assert changed[0] in text
    reasons = [str(each) for each in verify(from_csv(text.replace(*changed, 1)))]
    assert any(words in reason for reason in reasons), reasons


def test_an_update_that_nobody_agrees_on() -> None:
    program = afterwards("zb-h2", 2, 4, 2)
    rows = [row[:-1] for row in program.rows]
    assert [str(each) for each in verify(program.with_rows(rows))][:1] == ["rank 0, 0STEP: is never agreed on"]
    assert program.rows[0][-1].kind is Kind.AGREE
