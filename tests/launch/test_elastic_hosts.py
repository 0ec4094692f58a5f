"""An elastic run on several machines, by a real sshd: ranks and machines are lost, and no bit changes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from ssh_server import NEEDS_HOSTS, NEEDS_SSHD, Server, behind_a_bridge, ip
from test_elastic import CONFIG, LONG, assert_goes_on

import forked_python
from vpipe.rundir.manifest import checkpoints
from vpipe.rundir.roster import Roster

pytestmark = pytest.mark.timeout(280)
HANG = 200.0
WORDS = ("--set", "checkpoint.interval=100000", "--quiet")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    hosts = {"node-a": "127.0.0.2", "node-b": "127.0.0.3", "node-c": "127.0.0.4"}
    server = Server(tmp_path_factory.mktemp("sshd"), hosts)
    try:
        server.listen(list(hosts.values()))
        yield server
    finally:
        server.stop()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


class Far:
    """A run on machines; its processes are forks, unless another ``python`` is given."""

    def __init__(
        self,
        server: Server,
        config: Path,
        folder: Path,
        elastic: str,
        *machines: str,
        more: Sequence[str] = (),
        python: str | None = None,
    ) -> None:
        self.folder, self._log = folder, folder.with_suffix(".log")
        listed = f"launch.machines=[{', '.join(machines)}]"
        words = [
            "train",
            str(config),
            *WORDS,
            "--elastic",
            elastic,
            "--set",
            listed,
            "--output-dir",
            str(folder),
            *LONG,
            *more,
        ]
        self.process = subprocess.Popen(
            [python or forked_python.program(), "-m", "vpipe", *words],
            env=os.environ | {"VPIPE_SSH_CONFIG": str(server.config), "OMP_NUM_THREADS": "1"},
            stdout=self._log.open("wb"),
            stderr=subprocess.STDOUT,
        )

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def until(self, holds: Callable[[Roster], bool]) -> Roster:
        end = time.monotonic() + HANG
        while (roster := Roster.read(self.folder)) is None or not holds(roster):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < end, self.said
            time.sleep(0.02)
        return roster

    def stop(self) -> None:
        """In order: the ranks save and leave."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(HANG) == 75, self.said

    def assert_equal(self, config: Path, plain: Path) -> None:
        """Two iterations more, on this machine, end as in a run that was left alone."""
        assert_goes_on((str(config), *WORDS, *LONG), self.folder, plain)

    def recoveries(self) -> list[dict[str, Any]]:
        """What has been told of them so far, in whole lines."""
        lines = (self.folder / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == "recovery"]


def node_of(pid: int) -> psutil.Process:
    """rank → zygote → node."""
    return psutil.Process(pid).parents()[1]


@NEEDS_SSHD
@pytest.mark.slow
def test_a_lost_rank_and_a_lost_machine_change_no_bit(server: Server, config: Path, tmp_path: Path) -> None:
    """Of three machines one loses a rank, which comes back there; then another is lost whole: two ranks go on."""
    run = Far(server, config, tmp_path / "run", "2:3", "node-a:0", "node-b:0", "node-c:0")
    first = run.until(lambda roster: roster.has_stepped)
    psutil.Process(first.pids[2]).kill()
    second = run.until(lambda roster: roster.epoch > first.epoch and roster.has_stepped)
    assert len(second.ranks) == 3
    assert second.pids[0] == first.pids[0]  # who is well is not restarted
    run.until(lambda _: bool(run.recoveries()))  # rank 0 has told of it before it is lost
    node = node_of(second.pids[0])
    lost = [node, *node.children(recursive=True)]
    for process in lost:
        process.kill()
    run.until(lambda roster: roster.epoch > second.epoch and roster.has_stepped)
    run.stop()
    assert "node-a is lost" in run.said
    told = run.recoveries()
    assert [line["ranks"] for line in told] == [3, 2]
    assert told[1]["lost"] == ["rank 0 is lost with node-a"]
    run.assert_equal(config, tmp_path / "plain")


@NEEDS_SSHD
@pytest.mark.slow
@pytest.mark.parametrize("lost", ["launcher", "zygote"])
def test_a_killed_launcher_or_zygote_leaves_the_last_update_on_the_disk_and_no_process(
    lost: str, server: Server, config: Path, tmp_path: Path
) -> None:
    """Nobody is left who could lead: the ranks of all machines save together, and end with their nodes."""
    run = Far(server, config, tmp_path / "run", "2:3", "node-a:0", "node-b:0", "node-c:0")
    roster = run.until(lambda roster: roster.has_stepped)
    ranks = [psutil.Process(pid) for pid in roster.pids.values()]
    there = [*ranks, *(node_of(rank.pid) for rank in ranks)]
    assert not checkpoints(run.folder / "checkpoints")
    if lost == "launcher":
        run.process.kill()
    else:
        ranks[1].parent().kill()  # type: ignore[union-attr]
    run.process.wait(HANG)
    _, left = psutil.wait_procs(there, HANG)
    assert not left
    run.assert_equal(config, tmp_path / "plain")


@contextmanager
def three_machines(tmp_path: Path) -> Iterator[tuple[Server, Callable[[int], None]]]:
    """Machines far-0, far-1, far-2 with networks of their own behind a bridge; and how to cut one off."""
    tag = f"ve{os.getpid() % 100_000}"
    hosts = {f"far-{index}": f"10.199.78.{index + 2}" for index in range(3)}
    (tmp_path / "sshd").mkdir()
    server = Server(tmp_path / "sshd", hosts)
    with behind_a_bridge(server, tag, "10.199.78"):
        yield server, lambda index: ip("link", "set", f"{tag}h{index}", "down")


@NEEDS_SSHD
@pytest.mark.slow
@NEEDS_HOSTS
def test_a_machine_that_is_cut_off_has_ended_before_others_go_on(config: Path, tmp_path: Path) -> None:
    """The machine of rank 0, which writes checkpoints, loses its network: it is named, it ends by itself, and only then
    do the others go on."""
    with three_machines(tmp_path) as (server, cut):
        machines = ("far-0:0", "far-1:0", "far-2:0")
        run = Far(server, config, tmp_path / "run", "2:3", *machines, python=sys.executable)  # forks have one network
        before = run.until(lambda roster: roster.has_stepped)
        lost = [psutil.Process(before.pids[0]), node_of(before.pids[0])]
        cut(0)
        after = run.until(lambda roster: roster.epoch > before.epoch)
        assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in lost)
        assert len(after.ranks) == 2
        assert "far-0 is lost: no sign for" in run.said
        run.until(lambda roster: roster.has_stepped)
        run.process.terminate()
        run.process.wait(HANG)
