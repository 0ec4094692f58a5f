"""A trace of a device has the device's times, on the clock of the host; and what they are good for."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter_ns
from typing import Any

import pytest
from device_cases import OPTIMIZERS, batches, plain
from torch import nn

from vpipe import Pipeline
from vpipe.observe.bubbles import attribute
from vpipe.observe.measured import Measured
from vpipe.rundir.reader import Event
from vpipe.runtime.job import Trace
from vpipe.schedule.action import Kind

COMPUTES = (Kind.F, Kind.B)


def pipeline(**options: Any) -> Pipeline:
    return Pipeline(
        plain(4), nn.functional.mse_loss, num_microbatches=4, device="emu", optimizer=OPTIMIZERS["sgd"], **options
    )


def traced(pipe: Pipeline, emulated: Any, **settings: float) -> tuple[Trace, int, int]:
    """A step under these settings, and when the host began and had read it; one before is without them."""
    for number, batch in enumerate(batches(2, 32)):
        emulated.settings(**settings if number else {})
        begin = perf_counter_ns()
        pipe.train_step(*batch)
        end = perf_counter_ns()
    return pipe.trace(), begin, end


def test_times_are_the_devices(emulated: Any) -> None:
    """Kernels that take their time fill the trace, and not the moments in which the host hands them over."""
    pipe = pipeline(num_ranks=2)
    trace, begin, end = traced(pipe, emulated, op_us=3000)
    for records in trace.records.values():
        computed = [record for record in records if record.action.kind in COMPUTES]
        assert all(begin <= r.begin <= r.ready <= r.end <= end for r in records)
        assert all(one.end <= other.begin for one, other in pairwise(computed)), "a stream does one thing at a time"
        assert all(record.end - record.ready > 10_000_000 for record in computed), "a dozen kernels of three"
    first = [r for r in trace.records[0] if r.action.kind is Kind.F]
    assert all(r.enqueued for r in first)
    assert any(record.enqueued < record.begin for record in first), "the host runs ahead of the device"
    pipe.close()


def test_swaps_have_the_times_of_their_lane(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.runtime.memory.swap.MIN_BYTES", 64)
    pipe = pipeline(num_ranks=1, swap=1.0, schedule="gpipe")
    trace, begin, end = traced(pipe, emulated, copy_bytes_per_us=4)
    moves = [record for record in trace.records[0] if record.action.kind in (Kind.OUT, Kind.IN)]
    assert len(moves) == 8
    for move in moves:
        assert begin <= move.ready <= move.end <= end
        assert move.end - move.ready >= 1000 * move.bytes / 4, "so long take so many bytes"
    pipe.close()


def exposed(emulated: Any, **settings: float) -> int:
    """Nanoseconds that ranks wait for messages whose makers are done."""
    emulated.reset()
    pipe = pipeline(num_ranks=2, schedule="1f1b")
    trace, *_ = traced(pipe, emulated, **settings)
    origin = min(records[0].begin for records in trace.records.values())
    ranks = tuple(
        tuple(Event(r.action, r.begin - origin, r.ready - origin, r.end - origin) for r in trace.records[rank])
        for rank in range(2)
    )
    pipe.close()
    return attribute(Measured(trace.planned, ranks)).total("communication")


def test_exposed_communication_vanishes_where_the_link_is_fast(emulated: Any) -> None:
    """A message of 512 bytes over a link of half a second's latency keeps both ranks waiting, again and again; over one
    without, only as long as this machine takes. (The figures are those of ``benchmarks/devices``.)"""
    slow, fast = exposed(emulated, link_latency_us=500_000), exposed(emulated, link_latency_us=0)
    assert slow > 2 * 500_000_000, "one way and back at least"
    assert fast < slow / 2
