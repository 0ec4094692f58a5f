"""What the command line does with devices: configs, and clear words where there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vpipe.cli.main import main
from vpipe.observe.payload import payload, recorded
from vpipe.rundir.reader import open_run


def code_of(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(args))
    return int(end.value.code or 0)


CONFIG = """
model: {name: gpt, hidden_size: 16, num_layers: 2, num_heads: 2, sequence_length: 8}
dataset: {name: synthetic, batch_size: 4}
training: {num_microbatches: 2, max_iterations: 2}
parallel: {model_parallel_size: 2, transport: inprocess, scheduler: 1f1b, device: DEVICE}
"""


def losses(folder: Path, device: str) -> list[float]:
    folder.mkdir()
    config = folder / "job.yaml"
    config.write_text(CONFIG.replace("DEVICE", device))
    assert code_of("train", str(config), "--output-dir", str(folder / "run")) == 0
    return [
        json.loads(line)["loss"]
        for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
        if "loss" in line
    ]


def test_a_config_trains_on_devices_as_on_the_cpu(tmp_path: Path) -> None:
    """And the page shows how far hosts ran ahead of devices, and what was exposed of the communication."""
    assert losses(tmp_path / "emu", "emu") == losses(tmp_path / "cpu", "cpu")
    runs = {name: open_run(tmp_path / name / "run") for name in ("emu", "cpu")}
    shown = {name: payload(run, recorded(run)) for name, run in runs.items()}
    ahead = shown["emu"]["trend"]["ahead"]
    assert len(ahead) == 2
    assert all(seconds >= 0 for row in ahead for seconds in row), "how much depends on the load"
    assert shown["cpu"]["trend"]["ahead"] is None
    assert "communication" in [cause for cause, _ in shown["emu"]["causes"]]


@pytest.mark.parametrize("scheduler", ["1f1b", "pipedream"])
def test_parity_has_its_reference_on_the_device(
    scheduler: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], emulated: Any
) -> None:
    """Random numbers of a device are its own, so dropout tells whether one device is compared with several of its kind."""
    config = tmp_path / "job.yaml"
    config.write_text(CONFIG.replace("DEVICE", "emu").replace("num_heads: 2,", "num_heads: 2, extra: {dropout: 0.2},"))
    assert code_of("parity", str(config), "--scheduler", scheduler, "--steps", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["equal"]


def test_more_ranks_than_devices_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], emulated: Any
) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(CONFIG.replace("DEVICE", "emu"))
    with emulated.visible(1):
        assert code_of("train", str(config), "--output-dir", str(tmp_path / "run")) == 2
    assert "this machine has 1 of the device emu, but its ranks are 2" in "".join(capsys.readouterr())


OLD = """
model: {name: gpt, hidden_size: 16, num_layers: 2, num_heads: 2, sequence_length: 8}
dataset: {name: synthetic, batch_size: 4}
training: {num_microbatches: 2, max_iterations: 2}
parallel: {model_parallel_size: 2, transport: inprocess, scheduler: 1f1b, backend: nccl}
launch: {machines: [MACHINES]}
"""


def devices_of(folder: Path, machines: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    from vpipe.runtime.pipeline import Pipeline

    seen: list[str] = []
    train_step = Pipeline.train_step
    monkeypatch.setattr(
        Pipeline,
        "train_step",
        lambda self, *args, **more: (
            seen.extend(str(engine.device) for engine in self.engines),
            train_step(self, *args, **more),
        )[1],
    )
    config = folder / "job.yaml"
    config.write_text(OLD.replace("MACHINES", machines))
    code = code_of("train", str(config), "--output-dir", str(folder / "run"))
    os.environ.pop("VPIPE_DEVICES", None)  # the command leaves it to its own ranks, here threads of this process
    return code, seen


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ("'localhost:3', 'localhost:1'", ["emu:3", "emu:1"]),
        ("'localhost:2', 'localhost:2'", ["emu:2", "emu:2"]),
    ],
)
def test_the_machine_list_of_old_configs_chooses_devices(
    machines: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And asks for sharing where it names one twice; backend nccl means the device's own."""
    code, seen = devices_of(tmp_path, machines, monkeypatch)
    assert code == 0
    assert seen[:2] == expected


def test_a_device_that_a_machine_has_not_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = devices_of(tmp_path, "'localhost:0', 'localhost:9'", monkeypatch)
    assert code == 2
    assert "shall compute on emu:9, but there are 8, counted from 0" in "".join(capsys.readouterr())


@pytest.mark.parametrize(("first", "second"), [("cpu", "emu"), ("emu", "cpu")])
def test_a_run_goes_on_on_another_kind_of_device(first: str, second: str, tmp_path: Path) -> None:
    """Two iterations here and two there are four on the CPU, to the bit: weights, buffers, the optimizer's state."""
    whole = weights(tmp_path / "whole", 4, "cpu")
    weights(tmp_path / "run", 2, first)
    assert weights(tmp_path / "run", 4, second, "--resume", "latest") == whole


def weights(folder: Path, iterations: int, device: str, *more: str) -> dict[str, bytes]:
    """The files of the last checkpoint."""
    folder.mkdir(exist_ok=True)
    config = folder / "job.yaml"
    config.write_text(CONFIG.replace("DEVICE", device) + "checkpoint: {interval: 2}\n")
    found = ("--resume", str(folder / "run")) if more else ()
    words = ("--output-dir", str(folder / "run"), "--set", f"training.max_iterations={iterations}")
    assert code_of("train", str(config), *words, *found) == 0
    last = sorted((folder / "run" / "checkpoints").glob("iteration-*"))[-1]
    return {path.name: path.read_bytes() for path in sorted(last.glob("*.safetensors"))}
