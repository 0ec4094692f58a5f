"""Losses of ranks on the page: from metrics.jsonl to the table with bars."""

from __future__ import annotations

from vpipe.observe import payload

LINE = {
    "kind": "recovery",
    "iteration": 7,
    "ranks": 3,
    "lost": ["rank 1 was killed by SIGKILL"],
    "losses": 4,
    "noticed": 12.5,
    "seconds": {"agreed": 0.1, "groups": 0.3, "state": 0.1, "replay": 0.2},
    "time": 1.0,
}


def test_the_page_is_told_who_was_lost_and_what_the_time_went_to() -> None:
    assert payload.recoveries([{"kind": "train", "iteration": 7}, LINE]) == [
        {"iteration": 7, "ranks": 3, "lost": LINE["lost"], "losses": 4, "seconds": LINE["seconds"]}
    ]


def test_a_run_without_losses_has_none() -> None:
    assert payload.recoveries([{"kind": "train", "iteration": 7}]) == []
