"""The emulated accelerator as a vendor's package: torch loads it in every process, so whole commands run on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from emulated_ranks import vendor_commands

from vpipe.launch import chaos

pytestmark = pytest.mark.slow

FLAT = """
'partition': 'plan.json'
'config_file': 'mp_conf.json'
'machines': ['localhost:1', 'localhost:0']
'sync_mode': 'asp'
'distributed_backend': 'nccl'
'model_type': 'bert'
'synthetic_data': true
'batch_size': 4
'hidden_size': 16
'num_heads': 2
'num_layers': 2
'sequence_length': 8
'vocab_size': 50
'learning_rate': 0.01
'max_iterations': 2
'num_microbatches': 4
"""
"""VPipe's form."""
SECTIONS = """
model: {name: gpt, hidden_size: 16, num_layers: 2, num_heads: 2, sequence_length: 8}
dataset: {name: synthetic, batch_size: 4}
training: {num_microbatches: 2, max_iterations: 2}
parallel: {model_parallel_size: 2, scheduler: 1f1b, backend: nccl}
"""
"""OurGPipe's form."""


Vpipe = Callable[..., str]


@pytest.fixture(scope="module")
def vpipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vpipe]:
    with vendor_commands(tmp_path_factory.mktemp("vendor"), 2) as commands:
        yield commands


def written(folder: Path, config: str) -> Path:
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"partition": [2, 3], "recompute_ratio": [0.5, 0]}))
    ranks = {"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0], "1": [1]}}
    (folder / "mp_conf.json").write_text(json.dumps(ranks))
    file = folder / ("job.yml" if config == FLAT else "job.yaml")
    file.write_text(config)
    return file


def losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize(("config", "device"), [(FLAT, "auto"), (SECTIONS, "cpu")], ids=["VPipe", "OurGPipe"])
def test_nccl_configs_of_the_source_systems_train_as_processes(
    config: str, device: str, vpipe: Vpipe, tmp_path: Path
) -> None:
    """By the device's own backend, and equal to ranks of one process to the bit: on the CPU, or (the model of VPipe's has
    dropout, and a device its own random numbers) on devices."""
    file = written(tmp_path / "job", config)
    changes = [f"parallel.device={device}", "parallel.transport=inprocess", "parallel.backend=auto"]
    words = ["train", str(file), "--set", "launch.threads=1", "--output-dir"]
    vpipe(file.parent, *words, str(tmp_path / "here"), *(word for change in changes for word in ("--set", change)))
    vpipe(file.parent, *words, str(tmp_path / "there"))
    assert losses(tmp_path / "there") == losses(tmp_path / "here")
    assert len(losses(tmp_path / "there")) >= 2


def test_the_whole_profile_command_on_the_device(vpipe: Vpipe, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SECTIONS)
    vpipe(tmp_path, "profile", "job.yaml", "-o", "profile.json", "--repeat", "1")
    found = json.loads((tmp_path / "profile.json").read_text())
    assert found["device"]["device"] == "emulated accelerator"
    assert found["device"]["transport"] == "DeviceTransport"
    assert found["device"]["memory_bytes"] == 2**34
    assert found["swap_bandwidth"] > 0
    assert all(layer["forward"] > 0 for layer in found["layers"])


def test_what_forks_ranks_has_not_looked_at_devices(tmp_path: Path) -> None:
    """Whoever counts devices, or asks for a stream, has a context on a GPU, which a fork cannot use."""
    (tmp_path / "job.yaml").write_text(SECTIONS)
    with vendor_commands(tmp_path, 2, touches=1) as touching:
        touching(tmp_path, "train", "job.yaml", "--output-dir", "run")
    assert len(losses(tmp_path / "run")) >= 2


def test_the_doctor_lists_what_torch_finds(vpipe: Vpipe, tmp_path: Path) -> None:
    """Whatever the vendor: nobody but torch is asked."""
    told = json.loads(vpipe(tmp_path, "doctor", "--json"))
    (finding,) = [each for each in told["findings"] if each["topic"] == "accelerator"]
    assert finding["status"] == "found"
    assert "2 × emulated accelerator" in finding["detail"]
    assert "backend " in finding["detail"]


def test_layers_leave_a_device_that_is_slow_and_no_bit_changes(vpipe: Vpipe, tmp_path: Path) -> None:
    """``adapt`` reads the device's own times: its host only enqueues, and is as quick as the other's."""
    (tmp_path / "slow.py").write_text(
        "import os\nif os.environ.get('RANK') == '0':\n"
        "    import emulated_device\n    emulated_device.settings(op_us=1000)\n"
    )
    (tmp_path / "job.yaml").write_text(SECTIONS.replace("num_layers: 2", "num_layers: 4"))
    words = ["train", "job.yaml", "--set", "training.max_iterations=6", "--set", "parallel.partition=[5,1]"]
    vpipe(tmp_path, *words, "--plugin", "slow.py", "--set", "parallel.adapt=on", "--output-dir", "moved")
    vpipe(tmp_path, *words, "--output-dir", "plain")
    told = [json.loads(line) for line in (tmp_path / "moved" / "metrics.jsonl").read_text().splitlines()]
    moves = [line["partition"] for line in told if line.get("action") == "move"]
    assert moves, "the slow device keeps its layers"
    assert moves[0][0] < 5
    assert chaos.differences(tmp_path / "plain", tmp_path / "moved") == []
