"""What the command line does with devices: the proof, configs, and clear words where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vpipe.cli.main import main
from vpipe.schedule import catalog


def code_of(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(args))
    return int(end.value.code or 0)


@pytest.mark.slow
def test_the_doctor_proves_devices(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.train.proof.device.MOST_RANKS", 2)
    monkeypatch.setattr("vpipe.train.proof.device.NUM_STEPS", 1)
    some = [catalog.get(name) for name in ("1f1b", "zb-v", "gpipe", "pipedream")]
    monkeypatch.setattr("vpipe.train.proof.device.catalog.entries", lambda: some)
    assert code_of("doctor", "--devices", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"]
    assert {"1f1b", "zb-v", "pipedream"} <= {proof["schedule"] for proof in found["proofs"]}


def test_the_doctor_sees_a_forgotten_wait(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, emulated: Any
) -> None:
    """Without the receiver's wait the proof must not say equal."""
    from vpipe.train.proof import device

    monkeypatch.setattr("vpipe.runtime.transport.ondevice.taken", lambda carried, target: carried.value)
    monkeypatch.setattr(device.catalog, "entries", lambda: [device.catalog.get("1f1b")])
    monkeypatch.setattr(device, "NUM_STEPS", 1)
    emulated.settings(lazy=1)
    assert code_of("doctor", "--devices") == 1
    assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("devices", "words"), [(0, "torch finds no accelerator"), (1, "this machine has 1 emu device")]
)
def test_the_doctor_says_what_is_missing(
    devices: int, words: str, capsys: pytest.CaptureFixture[str], emulated: Any
) -> None:
    with emulated.visible(devices):
        assert code_of("doctor", "--devices") == 2
    assert words in "".join(capsys.readouterr())


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
    assert losses(tmp_path / "emu", "emu") == losses(tmp_path / "cpu", "cpu")


def test_more_ranks_than_devices_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], emulated: Any
) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(CONFIG.replace("DEVICE", "emu"))
    with emulated.visible(1):
        assert code_of("train", str(config), "--output-dir", str(tmp_path / "run")) == 2
    assert "this machine has 1 of the device emu, but its ranks are 2" in "".join(capsys.readouterr())
