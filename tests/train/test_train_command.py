"""``vpipe train`` as a user meets it: what it prints and writes, and one sentence for what is wrong."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from train_runs import tiny

import forked_python
from vpipe.cli.main import main
from vpipe.rundir.manifest import checkpoints
from vpipe.train.checkpoints.checkpoint import Checkpoint

Vpipe = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).parents[2]
PROCESSES = {"parallel.transport": "auto"}


def job(directory: Path, changes: dict[str, Any] | None = None) -> str:
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump(tiny(changes)))
    return str(file)


def complaint(code: object, output: str, errors: str) -> str:
    """The one sentence of an error."""
    assert code == 2, output + errors
    lines = [line for line in errors.splitlines() if not line.startswith("vpipe: warning: ")]
    assert len(lines) == 1, errors
    assert "Traceback" not in output + errors
    return lines[0]


def bad_json_line(folder: Path) -> dict[str, Any]:
    place = folder / "code" / "python" / "train"
    place.mkdir(parents=True)
    lines = [json.dumps({"code": "def f(): return 1", "docstring": "one", "code_tokens": [], "func_name": "f"})] * 20
    with gzip.open(place / "python_train_0.jsonl.gz", "wt") as file:
        file.write("\n".join([*lines, "{not json", *lines]))
    return {"dataset": {"name": "code_search_net", "path": str(folder / "code"), "batch_size": 8}}


def truncated_hdf5(folder: Path) -> dict[str, Any]:
    (folder / "part_training_0.hdf5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    model = {"name": "bert", "num_layers": 2, "hidden_size": 16, "num_heads": 2, "sequence_length": 8}
    return {"dataset": {"name": "bert", "path": str(folder), "batch_size": 8}, "model": model}


def other_model(folder: Path) -> dict[str, Any]:
    from train_runs import run

    run(tiny({"checkpoint.interval": 0, "training.max_iterations": 1}), folder / "old")
    return {"model.hidden_size": 32, "checkpoint.resume": str(folder / "old")}


BAD: dict[str, tuple[Any, str]] = {
    "no data": ({"dataset": {"name": "code_search_net", "path": "/nowhere"}}, "vpipe data build code --out"),
    "a JSON line that is none": (bad_json_line, "python_train_0.jsonl.gz:21: not JSON"),
    "truncated HDF5": (truncated_hdf5, "part_training_0.hdf5"),
    "tokens beyond the vocabulary": ({"model.vocab_size": 16}, "model.vocab_size is 16"),
    "a partition that does not fit": ({"parallel.partition": [1, 1]}, "holds 2 layers, but the model gpt has 4"),
    "a rate that is a string": ({"training.learning_rate": "fast"}, "training.learning_rate"),
    "a resume of another model": (other_model, "is a checkpoint of another model"),
    "a resume of nothing": ({"checkpoint.resume": "/nowhere"}, "there is nothing at /nowhere"),
    "too many stages": ({"parallel.model_parallel_size": 9}, "9 stages"),
    "an unknown model": ({"model.name": "gptt"}, "gpt"),
    "an unknown schedule": ({"parallel.scheduler": "1f1c"}, "1f1b"),
    "nccl": ({"parallel.backend": "nccl"}, "parallel.backend is nccl"),
    "tied and asynchronous": ({"model.name": "gpt2", "parallel.scheduler": "pipedream"}, "tied weights need"),
    "fp16 and asynchronous": ({"training.precision": "fp16", "parallel.scheduler": "pipedream"}, "loss scale"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, words = BAD[name]
    made = changes(tmp_path) if callable(changes) else changes
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["train", job(tmp_path, made), "--output-dir", str(tmp_path / "run")])
    sentence = complaint(end.value.code, *capsys.readouterr())
    assert sentence.startswith("vpipe: ")
    assert words in sentence


@pytest.mark.slow
def test_bad_input_with_real_ranks_is_one_sentence_too(tmp_path: Path, vpipe: Vpipe) -> None:
    file = job(tmp_path, PROCESSES | {"dataset": {"name": "text", "path": "/nowhere", "batch_size": 8}})
    done = vpipe("train", file, "--output-dir", str(tmp_path / "run"), timeout=200)
    assert "vpipe data build text" in complaint(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
def test_what_a_user_sees(tmp_path: Path, vpipe: Vpipe) -> None:
    """The whole way with real ranks: train, report, resume."""
    changes = PROCESSES | {"training.evaluation_interval": 4, "checkpoint.interval": 4, "observe.trace": True}
    directory = tmp_path / "run"
    done = vpipe("train", job(tmp_path, changes), "--output-dir", str(directory), timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("gpt (")
    assert "1f1b on 2 ranks, 2 stages, 4 microbatches" in lines[0]
    assert lines[1].startswith("iteration 1/8  epoch 0  loss ")
    assert "evaluation loss" in done.stdout
    assert lines[-1].startswith("done: 8 iterations")
    assert f"'vpipe report {directory}' shows it" in lines[-1]
    names = {path.name for path in directory.iterdir()}
    paper = {"config.yaml", "run.json", "metrics.jsonl", "summary.json", "state.json", "lineage.json", "lock"}
    assert names >= paper | {"events", "checkpoints", "logs"}
    command = json.loads((directory / "run.json").read_text())["command"]
    assert command[1:2] == ["train"]
    assert command[-2:] == ["--output-dir", str(directory)]
    assert vpipe("report", str(directory), timeout=200).returncode == 0
    again = vpipe("train", str(directory / "config.yaml"), "--resume", str(directory), timeout=200)
    assert again.returncode == 0, again.stderr


@pytest.mark.rotates(1)
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("scheduler", ["1f1b", "pipedream"])
def test_killed_and_resumed_is_the_run_that_never_stopped(scheduler: str, tmp_path: Path, vpipe: Vpipe) -> None:
    changes = PROCESSES | {
        "parallel.scheduler": scheduler,
        "training.epochs": 5,
        "checkpoint.interval": 2,
        "model.extra": {"dropout": 0.1},
        "observe.log_interval": 2,
    }
    file = job(tmp_path, changes)
    whole, part, rest = (tmp_path / name for name in ("whole", "part", "rest"))
    assert vpipe("train", file, "--output-dir", str(whole), timeout=200).returncode == 0
    words = [forked_python.program(), "-m", "vpipe", "train", file, "--output-dir", str(part)]
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        while len(checkpoints(part / "checkpoints")) < 2:
            assert running.poll() is None, "it ended before it could be killed"
            time.sleep(0.01)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    time.sleep(1.0)  # the ranks notice that their launcher is gone
    before = len((part / "metrics.jsonl").read_text().splitlines())
    assert before < 20, "killed in the middle"
    done = vpipe("train", file, "--output-dir", str(rest), "--resume", str(part), timeout=200)
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout
    last = [checkpoints(directory / "checkpoints")[-1] for directory in (whole, rest)]
    assert [path.name for path in last] == ["iteration-000020"] * 2
    files = [Checkpoint.open(path).manifest.files for path in last]
    assert files[0] == files[1], "every weight and every moment has the same checksum"


@pytest.mark.slow
def test_a_warning_signal_ends_a_run_in_good_order(tmp_path: Path) -> None:
    file = job(tmp_path, {"training.epochs": 10_000, "observe.log_interval": 1})
    words = [forked_python.program(), "-m", "vpipe", "train", file, "--output-dir", str(tmp_path / "run")]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    while "iteration" not in running.stdout.readline():
        pass
    running.send_signal(signal.SIGUSR1)
    said, _ = running.communicate(timeout=200)
    assert "asked to stop (SIGUSR1)" in said
    assert running.returncode == 75
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"] is True
    assert len(checkpoints(tmp_path / "run" / "checkpoints")) == 1


LATE = """
import os, time
from pathlib import Path
from vpipe.train.reporting.run_log import RunLog
folder, finish = Path(__file__).parent, RunLog.finish
def wait(name, rank=os.environ["RANK"], mkdir=os.mkdir, access=os.access, sleep=time.sleep, folder=str(folder)):
    if rank == "0":
        mkdir(f"{folder}/{name}")
        while not access(f"{folder}/go-on-{name}", 0):
            sleep(0.01)
def slowly(*words):
    wait("finishing")
    return finish(*words)
RunLog.finish = slowly
class Last:
    def __del__(self, wait=wait):
        wait("finalising")  # Python has given its handlers up
last = Last()
"""


@pytest.mark.slow
def test_a_rank_that_is_ending_is_deaf_to_warnings(tmp_path: Path) -> None:
    """A cluster tells one rank after the other: rank 0 hears when rank 1's warning has ended the run already."""
    (tmp_path / "late.py").write_text(LATE)
    endless = {"training.epochs": 10_000, "observe.log_interval": 1, "plugins": [str(tmp_path / "late.py")]}
    file = job(tmp_path, PROCESSES | endless)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    words = [sys.executable, "-m", "vpipe", "train", file, "--output-dir", str(tmp_path / "run")]
    ranks = [
        subprocess.Popen(
            words, env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.DEVNULL
        )
        for rank in range(2)
    ]

    def until(name: str) -> None:
        while not (tmp_path / name).exists():
            assert ranks[0].poll() is None
            time.sleep(0.01)

    until("run/metrics.jsonl")
    ranks[1].send_signal(signal.SIGUSR1)
    for name in ("finishing", "finalising"):
        until(name)
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
            ranks[0].send_signal(number)
        (tmp_path / f"go-on-{name}").touch()
    assert [rank.wait(100) for rank in ranks] == [75, 75]
    assert len(checkpoints(tmp_path / "run" / "checkpoints")) == 1


SLOW_DATA = """
import os, time
from pathlib import Path
from vpipe.data import synthetic
read, folder = synthetic.Synthetic.batch, Path(__file__).parent
def batch(self, indices):
    if (folder / "run" / "metrics.jsonl").exists() and os.environ.get("RANK") == "0":  # within the second iteration
        (folder / "inside").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
    return read(self, indices)
synthetic.Synthetic.batch = batch
"""


@pytest.mark.rotates(1)
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_request_within_a_long_iteration_waits_for_its_checkpoint(tmp_path: Path, number: int, code: int) -> None:
    """Ranks that are processes: the iteration ends when the test says so, after the request was heard."""
    (tmp_path / "slow.py").write_text(SLOW_DATA)
    changes = {"training.epochs": 10_000, "observe.log_interval": 1, "plugins": [str(tmp_path / "slow.py")]}
    file = job(tmp_path, PROCESSES | changes)
    words = [forked_python.program(), "-m", "vpipe", "train", file, "--output-dir", str(tmp_path / "run")]
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "inside").exists():
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(number)
    assert running.stderr is not None
    while "stopping 2 ranks" not in running.stderr.readline():
        assert running.poll() is None
    (tmp_path / "go").touch()
    running.communicate(timeout=200)
    assert running.returncode == code
    ending = json.loads((tmp_path / "run" / "summary.json").read_text())["ending"]
    assert ending["saved"] == ending["iteration"] >= 1
    assert len(checkpoints(tmp_path / "run" / "checkpoints")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_4vpipe_cpu.yml", "bert_4gpipe_cpu.yml", "gpt_zerobubble_cpu.yaml"])
def test_old_files_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "training.max_iterations=3", "--set", "parallel.transport=inprocess"]
    with pytest.raises(SystemExit) as end:
        main(["train", str(ROOT / "configs" / name), *words, "--output-dir", str(tmp_path / "run")])
    said, complained = capsys.readouterr()
    assert end.value.code == 0, complained
    assert "done: 3 iterations" in said
    assert "Traceback" not in complained


@pytest.mark.rotates(1)
@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["1f1b", "pipedream"])
def test_parity_over_real_ranks(scheduler: str, tmp_path: Path, vpipe: Vpipe) -> None:
    done = vpipe("parity", job(tmp_path, PROCESSES), "--scheduler", scheduler, "--steps", "2", timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("equal to the bit: ")


@pytest.mark.parametrize("changes", [{}, {"training.gradient_accumulation": 2}, {"parallel.scheduler": "pipedream"}])
def test_a_first_step_is_checked(changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", job(tmp_path, changes), "--check", "--output-dir", str(tmp_path / "run")])
    assert end.value.code == 0
    assert capsys.readouterr().out.count("step 0 is equal to one process to the bit: ") == 1


@pytest.mark.slow
def test_a_local_run_keeps_what_vpipe_kept(tmp_path: Path) -> None:
    """And under pipedream the first line does not call the units between two drains the config's microbatches."""
    rarely = {"training.max_iterations": 2, "observe.log_interval": 10}
    file = job(tmp_path, {**PROCESSES, "parallel.scheduler": "pipedream", **rarely})
    words = [forked_python.program(), "-m", "vpipe", "train", file, "--output-dir", "run"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    assert (run / "machinefile").read_text() == "localhost:0\nlocalhost:1\n"
    assert "train" in (run / "command_history.log").read_text()
    assert (run / "job.yaml").read_text() == Path(file).read_text()
    assert "iteration" in (run / "output.log.0").read_text()
    assert "4 microbatches an iteration, 8 between two drains" in done.stdout
