"""Ranks that read different clocks: a time namespace gives one of two processes a clock that is a day ahead."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from train_runs import Run, tiny

import forked_python
from vpipe.observe.console import Console
from vpipe.observe.measured import Measured
from vpipe.observe.payload import recorded
from vpipe.rundir.reader import open_run
from vpipe.runtime import job
from vpipe.runtime.transport.base import Transport, gather_text
from vpipe.runtime.transport.inprocess import Hub
from vpipe.schedule.action import Action, Kind
from vpipe.train.reporting import clocks

AHEAD = 86_400
ELSEWHERE = ("unshare", "--time", "--monotonic", str(AHEAD), "--fork", "--kill-child")

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


def can_unshare() -> bool:
    try:
        return subprocess.run([*ELSEWHERE, "true"], capture_output=True, timeout=200, check=False).returncode == 0
    except OSError:
        return False


def train(folder: Path, *prefixes: tuple[str, ...]) -> tuple[str, list[Measured]]:
    """A short run whose ranks start with these commands before their own: what rank 0 said, and the recorded steps."""
    config = tiny({"observe.trace": True, "parallel.transport": "distributed", "training.max_iterations": 6})
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable if any(prefixes) else forked_python.program(),
        "-m",
        "vpipe",
        "train",
        "config.yaml",
        "--output-dir",
        "run",
    ]
    ranks = []
    for rank, prefix in enumerate(prefixes):
        place = {"RANK": str(rank), "WORLD_SIZE": str(len(prefixes)), "LOCAL_RANK": str(rank)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(
            subprocess.Popen(
                [*prefix, *command], cwd=folder, env=os.environ | place, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    said = [each.communicate(timeout=200)[0] for each in ranks]
    assert [each.returncode for each in ranks] == [0] * len(ranks), "\n".join(said)
    return said[0], recorded(open_run(folder / "run"))


def raw_origins(folder: Path) -> list[int]:
    lines = [(folder / f"run/events/rank{rank}.jsonl").read_text().splitlines()[-1] for rank in range(2)]
    return [json.loads(line)["origin_ns"] for line in lines]


def early(step: Measured) -> int:
    """Nanoseconds by which a forward of stage 1 began before stage 0 had ended its own, at most."""
    ends = {e.action.microbatch: e.end for e in step.ranks[0] if e.action.kind is Kind.F}
    return max(ends[e.action.microbatch] - e.ready for e in step.ranks[1] if e.action.kind is Kind.F)


@pytest.mark.skipif(not can_unshare(), reason="time namespaces need root and a Linux that has them")
def test_ranks_with_different_clocks_are_drawn_on_one(tmp_path: Path) -> None:
    said, steps = train(tmp_path, (), ELSEWHERE)
    found = re.search(r"different clocks; aligned within (\d+) µs", said)
    assert found is not None, said
    error = 1000 * (int(found[1]) + 1)
    assert error < 1_000_000_000
    assert len(steps) == 6
    for step in steps:
        assert early(step) <= error
        assert step.span < 60_000_000_000
    here, there = raw_origins(tmp_path)
    assert abs(here - there) < 60_000_000_000


def test_ranks_of_one_machine_ask_nobody(tmp_path: Path) -> None:
    said, steps = train(tmp_path, (), ())
    assert "different clocks" not in said
    assert all(early(step) <= 0 for step in steps)


def numbers_of_all(transport: Transport, numbers: list[float]) -> list[list[float]]:
    blocks = transport.all_gather(torch.tensor(numbers, dtype=torch.float64), range(2), [len(numbers)] * 2)
    return [block.tolist() for block in blocks]


@pytest.mark.parametrize(("again", "asked"), [(0.0, [0, 1, 2, 3]), (1e9, [0, 1])])
def test_all_ask_again_when_rank_0_says_so(again: float, asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "AGAIN", again)
    monkeypatch.setattr(clocks, "identity", lambda: threading.current_thread().name)
    found: dict[int, list[int]] = {0: [], 1: []}

    def rank(transport: Transport) -> None:
        pipeline: Any = SimpleNamespace(
            is_leader=not transport.rank,
            transport=transport,
            gather=partial(gather_text, transport),
            gather_numbers=partial(numbers_of_all, transport),
        )
        mine = clocks.Clocks(pipeline)
        for iteration in range(4):
            mine.error = None
            mine.align(iteration)
            if mine.error is not None:
                found[transport.rank].append(iteration)
                assert abs(mine.offset.nanoseconds) <= mine.error

    threads = [threading.Thread(target=rank, args=(transport,)) for transport in Hub(2).transports()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {0: asked, 1: asked}


def test_a_wait_for_a_processor_is_no_longer_than_the_time_it_is_part_of() -> None:
    (record,) = job.recorded([(Action(0, Kind.F, 0), print)], [(10, 20, 50, 99, 99)])
    assert (record.late, record.stalled) == (10, 30)


def test_a_terminal_says_how_much_each_rank_worked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bars were always empty: nothing told it of ranks but the memory of the first."""
    monkeypatch.setattr(Console, "is_live", True)
    log = Run(tiny({"observe.trace": True}), tmp_path / "run").train().trainer.log
    log._looked = (0.0, {})
    shown = log._of_ranks()
    assert len(shown["busy"]) == len(shown["memory"]) == 2
    assert all(0 <= share <= 1 for share in shown["busy"]), shown["busy"]
    assert any(shown["busy"])
    assert log._of_ranks() is shown, "read again when there may be something new"
