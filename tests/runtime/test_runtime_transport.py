"""One suite for all transports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import runtime_transports as scenarios
from runtime_gloo import Worlds
from runtime_models import build
from runtime_support import Case, check, pipeline

from vpipe.runtime.transport.wire import Envelope

Run = Callable[..., list[Any]]


@pytest.fixture(params=["threads", "blocking threads", "gloo", "distributed", "shm"])
def run(request: pytest.FixtureRequest) -> Run:
    """Both ranks' answers to a scenario."""
    if request.param in ("gloo", "distributed", "shm"):
        worlds: Worlds = request.getfixturevalue("worlds")
        return lambda *arguments: worlds.run(2, scenarios.in_process_group, request.param, *arguments)
    return lambda *arguments: scenarios.in_threads(*arguments, blocking=request.param != "threads")


def test_order(run: Run) -> None:
    assert run(scenarios.order)[1] == list(range(50))


def test_many_channels(run: Run) -> None:
    found = run(scenarios.many_channels)[1]
    assert len(found) == 48
    assert all(values == [float(s * 10 + t)] * (k + 1) for (s, t, k, _), values in found)


def test_sizes(run: Run) -> None:
    lengths = (10, 300_000, 5, 1_000_000, 0, 70_000)
    assert run(scenarios.sizes)[1] == [length + k for length in lengths for k in (2, 0, 1)]


def test_kinds(run: Run) -> None:
    run(scenarios.kinds)


def test_what_was_sent_may_be_changed(run: Run) -> None:
    assert run(scenarios.changed_afterwards)[1] == [0.0, 1000.0, 2000.0, 3000.0]


@pytest.mark.parametrize("sent", [Envelope(0, 0, 1, 4, 0), Envelope(7, 0, 1, 3, 0)])
def test_another_message_is_an_error_in_words(run: Run, sent: Envelope) -> None:
    said = run(scenarios.wrong_message, sent, Envelope(0, 0, 1, 3, 0))[1]
    assert f"expected {Envelope(0, 0, 1, 3, 0)}, but received {sent}" in said


def test_collectives(run: Run) -> None:
    everything = [[[0.0, 1.0], [0.0, 1.0, 2.0]]] * 2 + [[[3.0, 3.0], [3.0, 3.0]]]
    assert run(scenarios.collectives) == [everything, everything]


def test_naive_is_blocking() -> None:
    check(Case("naive", "plain", 3, 4, recompute=0.5))
    pipe = pipeline(Case("naive", "plain", 2, 4), build("plain", 6), 2)
    assert pipe.engines[0].transport.hub.blocking  # type: ignore[attr-defined]
    pipe = pipeline(Case("gpipe", "plain", 2, 4), build("plain", 6), 2)
    assert not pipe.engines[0].transport.hub.blocking  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-v", "interleaved", "pipedream", "hanayo"])
def test_every_program_runs_if_every_send_waits(schedule: str) -> None:
    check(Case(schedule, "skips", 3, 5, num_layers=12, more={"blocking": True}))
