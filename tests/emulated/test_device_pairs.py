"""The pair table on emulated devices: every feature beside devices, in programs that have all of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "pairs"))
import cases
from test_pairs import SEED, wrong

ALONE = [
    f"{name}={value}" for name, values in cases.FEATURES.items() for value in values[1:] if name not in cases.ELSEWHERE
]


def test_one_tensor_by_two_names_stays_one_between_devices(emulated: Any) -> None:
    assert not wrong([cases.parsed(["ranks=4", "cut=front", "skip=twice", "devices=True"])])


@pytest.mark.slow
@pytest.mark.rotates(12)
@pytest.mark.parametrize("words", ALONE)
def test_every_value_on_devices(words: str, emulated: Any) -> None:
    case = cases.parsed(["devices=True", words])
    assert cases.impossible(case) or not wrong([case])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pairs_on_devices(emulated: Any) -> None:
    """Of the covering cases those on devices."""
    chosen = [case for case in cases.covering(SEED, ["devices"]) if case["devices"]]
    assert not wrong(chosen[:30])
