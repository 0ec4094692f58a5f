"""Small parts of the page and the clock, each by its own numbers."""

from __future__ import annotations

from vpipe.observe.clock import offset
from vpipe.observe.trend import thinned


def test_a_thinned_curve_keeps_its_ends() -> None:
    lines = [{"iteration": number} for number in range(1000)]
    found = [line["iteration"] for line in thinned(lines, 7)]
    assert found == [0, 166, 333, 500, 666, 832, 999]
    assert thinned(lines[:7], 7) == lines[:7]
    assert [line["iteration"] for line in thinned(lines[:8], 7)][-1] == 7


def test_the_other_clock_was_read_in_the_middle_of_the_trip() -> None:
    """Three round trips of 100, 10 and 40: the shortest counts, and its answer belongs to its midpoint."""
    here = iter([0, 100, 1000, 1010, 2000, 2040])
    there = iter([5_000, 6_107, 7_000])
    found = offset(lambda: next(there), rounds=3, clock=lambda: next(here))
    assert (found.nanoseconds, found.error) == (6_107 - 1005, 5)
