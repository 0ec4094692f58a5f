"""What a node does whose launcher is silent, by what SLURM says; ``test_slurm_elastic`` has it with a real SLURM."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from vpipe.errors import UserError
from vpipe.launch import slurm_return
from vpipe.launch.slurm_return import LostJob
from vpipe.launch.zygote import Zygote

JOB = LostJob("7", "1", "n1")


class Slurm:
    """Answers as scontrol would: one answer of ``jobs`` after the other, the last one for good."""

    def __init__(self, jobs: Sequence[str], node: str = "IDLE", requeues: bool = True) -> None:
        self._jobs, self._last, self._node, self._requeues = iter(jobs), "", node, requeues
        self.requeued = 0

    def __call__(self, words: Sequence[str]) -> str:
        if words[1] == "requeue":
            self.requeued += 1
            if not self._requeues:
                raise UserError("scontrol requeue 7 failed: Job is pending execution")
            return ""
        if "hostnames" in words:
            return words[-1].replace(",", "\n")
        if "node" in words:
            return f"NodeName=n1 State={self._node} Owner=N/A\n"
        self._last = next(self._jobs, self._last)
        if not self._last:
            raise UserError("scontrol show job 7 failed: Unable to contact slurm controller")
        return self._last


def job(state: str = "RUNNING", restarts: int = 1, nodes: str = "n1,n2", requeue: int = 1, output: str = "") -> str:
    return f"JobId=7 JobState={state} Requeue={requeue} Restarts={restarts} NodeList={nodes} StdOut={output}\n"


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_return, "POLL", 0.0)


@pytest.mark.parametrize("slurm", [Slurm([job()], "DOWN*"), Slurm([job(), "", job(), job(nodes="n2")])])
def test_a_job_whose_first_node_slurm_gives_up_is_saved_and_then_queued_again(slurm: Slurm) -> None:
    """Down, or taken from the job; a controller that does not answer for a while is asked again."""
    saved: list[int] = []

    def save() -> bool:
        saved.append(slurm.requeued)
        return len(saved) == 2

    JOB.come_back(save, slurm)
    assert saved == [0, 0]
    assert slurm.requeued == 1


@pytest.mark.parametrize(
    "last", [job("COMPLETED"), job(restarts=2, nodes="n2"), job("PENDING", 2, ""), job(nodes="n2", requeue=0)]
)
def test_a_job_that_has_ended_or_lives_again_or_may_not_is_left_alone(last: str) -> None:
    slurm = Slurm([job(), job(), last])
    JOB.come_back(pytest.fail, slurm)
    assert not slurm.requeued


def test_who_comes_second_is_not_disturbed_and_copies_that_do_not_come_hold_nobody_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(slurm_return, "SAVED_WITHIN", 0.0)
    output = tmp_path / "out"
    slurm = Slurm([job(nodes="n2", output=str(output))], requeues=False)
    JOB.come_back(lambda: False, slurm)
    assert slurm.requeued == 1
    assert "n1, where the launcher was, is lost" in output.read_text()


def test_a_zygote_takes_a_launcher_for_gone_that_left_words_unread() -> None:
    """The kernel tells a reset instead of an end then; the copies were not saved."""
    ours, theirs = socket.socketpair()
    zygote = Zygote(ours, {}, b"")
    zygote.tell({"ended": 0, "status": 0})
    theirs.close()
    assert zygote._receive() == (b"", [])
    ours.close()
