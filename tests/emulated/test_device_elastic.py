"""Elastic runs on devices: a rank is killed or stopped, ranks leave and come, and no bit changes.

Beside whole runs: what they need of devices. A wait for a rank that is gone is ended, and whatever the device makes of
messages that never came is not believed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from emulated_ranks import on_ranks, vendor_commands, vendor_environment

from vpipe.errors import UserError
from vpipe.launch import chaos
from vpipe.rundir import roster as rosters
from vpipe.rundir.roster import Roster
from vpipe.runtime import device as devices
from vpipe.runtime.ranks import device_groups
from vpipe.runtime.ranks.failure import PeerLost
from vpipe.train.preflight import refuse

JOB: dict[str, Any] = {
    "model": {
        "name": "gpt",
        "hidden_size": 16,
        "num_layers": 4,
        "num_heads": 2,
        "sequence_length": 8,
        "extra": {"dropout": 0.1},
    },
    "dataset": {"name": "synthetic", "batch_size": 8},
    "training": {
        "num_microbatches": 4,
        "max_iterations": 12,
        "evaluation_interval": -1,
        "gradient_clipping": 1.0,
    },
    "parallel": {"model_parallel_size": 3, "scheduler": "1f1b", "device": "emu"},
    "observe": {"trace": False},
    "launch": {"threads": 1},
}


@pytest.mark.parametrize("wanted", ["auto", "emu"])
def test_each_rank_that_may_come_needs_a_device(wanted: str, emulated: Any) -> None:
    config = JOB | {
        "parallel": {"model_parallel_size": 3, "scheduler": "1f1b", "device": wanted},
        "launch": {"elastic": "2:4"},
    }
    with (
        emulated.visible(3),
        pytest.raises(UserError, match=r"2:4 allows 4 ranks.* has 3 of the device emu; lower MAX"),
    ):
        refuse(config)
    refuse(config)


def test_what_is_read_after_the_communicators_were_ended_is_not_believed() -> None:
    numbers: dict[str, Any] = {"loss": torch.ones((), device="emu:0")}
    device_groups.current().abort()
    with pytest.raises(PeerLost, match="a rank is gone"):
        devices.read(numbers)
    device_groups.forget()
    devices.read(numbers)
    assert numbers == {"loss": 1.0}


def test_who_ends_the_groups_of_one_meeting_leaves_the_next_alone() -> None:
    before = device_groups.current()
    device_groups.forget()
    before.abort()  # a thread that came late
    device_groups.check()


def test_a_device_that_fails_for_good_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is told once is one of the step that is thrown away; one that stays (an assertion of a CUDA kernel)
    makes the process useless, which then ends as if it had been killed."""
    device_groups.remember(None, torch.device("emu:0"))
    torch.nn.Embedding(4, 4).to("emu:0")(torch.tensor([9], device="emu:0"))
    device_groups.forget()

    def broken(device: torch.device) -> None:
        raise RuntimeError("device-side assert triggered")

    device_groups.remember(None, torch.device("emu:0"))
    monkeypatch.setattr(torch.accelerator, "synchronize", broken)
    with pytest.raises(device_groups.DeviceLost, match="emu:0 fails again and again"):
        device_groups.forget()
    device_groups.forget()


def test_a_device_that_does_not_end_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its communicators are ended nothing keeps it, so it is waited for as long as that may take, and no longer."""
    ends = threading.Event()
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: ends.wait())
    monkeypatch.setattr(device_groups, "WITHIN", 0.2)
    device_groups.remember(None, torch.device("emu:0"))
    with pytest.raises(device_groups.DeviceLost, match="emu:0 has not come to an end within"):
        device_groups.forget()
    ends.set()
    monkeypatch.undo()
    device_groups.forget()


def lonely(rank: int) -> Any:
    """Rank 0 waits on its device for a message that rank 1 never sends, until another thread ends the communicators."""
    import transport_suite

    from vpipe.runtime.transport.wire import Envelope

    device = torch.device("emu", rank)
    transport = transport_suite.between_devices(device)
    transport.begin_program("a program", lambda: "data of one form")
    transport.begin_step(0)
    found: list[Any] = []
    envelope = Envelope(0, 0, 1, 0, 0)._replace(source=1, target=0)
    if rank:
        transport.send(envelope, 0, torch.ones(8, device=device))
    else:
        transport.post(envelope, 1)
        found.append(float(transport.take(envelope).sum()))
    transport.host.barrier()
    transport.begin_program("a program", lambda: "data of one form")
    transport.begin_step(1)
    if rank == 0:
        envelope = envelope._replace(step=1)
        transport.post(envelope, 1)
        total = transport.take(envelope).sum()
        threading.Timer(0.5, device_groups.current().abort).start()
        try:
            found.append(float(total))
        except RuntimeError as error:
            found.append("aborted" in str(error))
        device_groups.forget()
        found.append(float(torch.ones(4, device=device).sum()))
    transport.host.barrier()
    return found


@pytest.mark.slow
def test_a_wait_on_a_device_can_be_ended_by_another_thread() -> None:
    assert on_ranks(lonely, 2, timeout=120)[0] == [8.0, True, 4.0]


@pytest.mark.rotates(1, of="lost ranks")
@pytest.mark.slow
def test_killed_and_stopped_ranks_on_devices_change_no_bit(tmp_path: Path) -> None:
    """As threads of a device may run, and with peers whose absence nobody notices until the communicators are ended, as
    NCCL's may; layers move meanwhile."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    blows = ("--kills", "3", "--stops", "1", "--moves", "1", "--seed", "5")
    with vendor_commands(tmp_path, 3, jitter_us=100, lost_hangs=1) as vpipe:
        found = json.loads(vpipe(tmp_path, "chaos", "job.yaml", *blows, "--json", "--output-dir", "runs"))
    assert found["equal"]
    assert (found["kills"], found["stops"], found["moves"]) == (3, 1, 1)
    facts = json.loads((tmp_path / "runs" / "broken-1" / "run.json").read_text())
    assert "emu" in json.dumps(facts), "the ranks were on devices"


@pytest.mark.rotates(1, of="lost ranks")
@pytest.mark.slow
def test_fewer_and_more_ranks_on_devices_change_no_bit(tmp_path: Path) -> None:
    """A rank is killed and two go on; then a third is asked for, and takes the device that was left."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    words = ("train", "job.yaml", "--quiet", "--set", "training.max_iterations=24", "--output-dir")
    environment, folder = vendor_environment(tmp_path, 3), tmp_path / "run"
    fresh = [sys.executable, "-m", "vpipe", *words]
    subprocess.run([*fresh, "plain"], env=environment, cwd=tmp_path, timeout=400, check=True)
    command = [*fresh, str(folder), "--elastic", "2:3", "--set", "launch.on_loss=shrink"]
    with (tmp_path / "said").open("wb") as said:
        running = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=said, stderr=subprocess.STDOUT)
    try:
        for num_ranks in (3, 2, 3):
            while (roster := Roster.read(folder)) is None or len(roster.ranks) != num_ranks or not roster.has_stepped:
                assert running.poll() is None, (tmp_path / "said").read_text()
                time.sleep(0.02)
            if num_ranks == 2:
                rosters.want(folder, 3)  # what 'vpipe scale' does
            elif roster.epoch == 1:
                os.kill(roster.pids[1], signal.SIGKILL)
        assert running.wait(300) == 0, (tmp_path / "said").read_text()
    finally:
        running.kill()
        running.wait()
    assert chaos.differences(tmp_path / "plain", folder) == []
