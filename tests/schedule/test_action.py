"""Actions read back what they write, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from vpipe.schedule.action import OF_A_STAGE, Action, Kind, parse


@given(some.integers(0, 9999), some.sampled_from(list(Kind)), some.integers(0, 9999))
def test_text_comes_back(stage: int, kind: Kind, microbatch: int) -> None:
    action = Action(stage, kind, -1 if kind in OF_A_STAGE else microbatch)
    assert parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F", "0", "0F", "F0", "0X0", "0F-1", "0STEP3", "0REDUCE1", "0 F0", "0f0", "0F0,", "٣F0x"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        parse(text)


def test_b_is_i_then_w_in_the_glossary() -> None:
    assert [str(Action(2, kind, 0)) for kind in (Kind.F, Kind.SEND_F, Kind.OUT)] == ["2F0", "2SEND_F0", "2OUT0"]
    assert str(Action(2, Kind.STEP)) == "2STEP"
