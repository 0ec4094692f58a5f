"""The trace: valid Chrome JSON, arrows with two ends, and a program that verifies when read back."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from observe_runs import MakeRun

from vpipe.errors import UserError
from vpipe.observe import clock
from vpipe.observe.report import MAX_BYTES, write_report
from vpipe.observe.trace import programs
from vpipe.rundir.reader import open_run
from vpipe.schedule.verify import verify


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved", "pipedream", "pipedream-2bw"])
def test_executed_actions_read_back_to_a_program_that_verifies(make_run: MakeRun, schedule: str) -> None:
    path = make_run(schedule, 4, 8, steps=2)
    written = write_report(path)
    assert written.trace is not None
    planned = open_run(path).program
    for rows in programs(written.trace).values():
        executed = planned.with_rows(rows)
        assert executed == planned
        assert verify(executed) == []


def test_events_are_what_perfetto_wants(make_run: MakeRun) -> None:
    path = make_run("1f1b", 4, 8, steps=3)
    written = write_report(path)
    assert written.trace is not None
    events = json.loads(gzip.decompress(written.trace.read_bytes()))["traceEvents"]
    kinds = Counter(event["ph"] for event in events)
    assert kinds["s"] == kinds["f"] == 3 * 2 * 3 * 8  # steps · directions · boundaries · microbatches
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    for end in (event for event in events if event["ph"] == "f"):
        start = starts[end["id"]]
        assert start["pid"] != end["pid"]
        assert start["ts"] <= end["ts"]
    threads = {(event["pid"], event["tid"]) for event in events}
    assert len({process for process, _ in threads}) == 4
    assert len({thread for _, thread in threads}) == len(threads) == 4 * 2
    assert kinds["C"] == 3 * 4 * 2
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    forward = next(event for event in slices if event["name"] == "2F3")
    assert forward["args"] | {"stage": 2, "microbatch": 3, "bytes": 1024, "version": 0} == forward["args"]


def test_a_truncated_trace_is_one_sentence(make_run: MakeRun, tmp_path: Path) -> None:
    written = write_report(make_run("1f1b", 2, 4))
    assert written.trace is not None
    broken = tmp_path / "trace.json.gz"
    broken.write_bytes(written.trace.read_bytes()[:100])
    with pytest.raises(UserError, match="cut off"):
        programs(broken)


@pytest.mark.slow
def test_a_large_run_fits(make_run: MakeRun) -> None:
    written = write_report(make_run("1f1b", 8, 64, steps=20))
    assert written.report.stat().st_size < MAX_BYTES


def test_clocks_are_aligned_within_half_a_round_trip() -> None:
    here, there, late = iter(range(0, 10**9, 700)), 10**12, iter([5, 0, 300])
    now = [0]

    def local() -> int:
        now[0] = next(here)
        return now[0]

    found = clock.offset(lambda: now[0] + there + 350 + next(late), rounds=3, clock=local)
    assert abs(found.nanoseconds - there) <= found.error + 300
    assert clock.identity() == clock.identity() != ""
