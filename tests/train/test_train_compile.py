"""``model.compile: true`` compiles layers (inductor on the CPU), or says in a sentence why it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch._dynamo

from vpipe.cli.main import main

CONFIG = """
model: {name: gpt, hidden_size: 16, num_layers: 2, num_heads: 2, sequence_length: 8, compile: COMPILE}
dataset: {name: synthetic, batch_size: 4}
training: {num_microbatches: 2, max_iterations: 2}
parallel: {model_parallel_size: RANKS, transport: inprocess, scheduler: SCHEDULER, device: cpu}
"""


def code_of(folder: Path, compile: str = "true", ranks: int = 2, scheduler: str = "1f1b") -> int:
    folder.mkdir()
    text = CONFIG.replace("COMPILE", compile).replace("RANKS", str(ranks)).replace("SCHEDULER", scheduler)
    (folder / "job.yaml").write_text(text)
    torch._dynamo.reset()  # what another run has compiled, for other shapes too, is not used
    with pytest.raises(SystemExit) as end:
        main(["train", str(folder / "job.yaml"), "--output-dir", str(folder / "run")])
    return int(end.value.code or 0)


def losses(folder: Path) -> list[float]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [line["loss"] for line in found if line["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.timeout(500)  # a compiler beside other tests
@pytest.mark.rotates(1)
@pytest.mark.parametrize("scheduler", ["1f1b", "pipedream"])
def test_layers_are_compiled_wherever_they_are(tmp_path: Path, scheduler: str) -> None:
    """Cut or not, the same kernels run: equal to the bit (where updates come as in one process); and close to what is not
    compiled, which rounds otherwise."""
    from torch._dynamo.utils import counters

    counters.clear()
    assert code_of(tmp_path / "cut", scheduler=scheduler) == 0
    assert counters["stats"]["unique_graphs"] > 0, "something was compiled"
    assert code_of(tmp_path / "plain", compile="false") == 0
    if scheduler == "1f1b":
        assert code_of(tmp_path / "one", ranks=1) == 0
        assert losses(tmp_path / "cut") == losses(tmp_path / "one")
        assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    assert losses(tmp_path / "cut")[0] == pytest.approx(losses(tmp_path / "plain")[0], rel=1e-2)


def test_a_split_backward_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(tmp_path / "split", scheduler="zb-h1") == 2
    assert "zb-h1 takes the weights' gradients apart (I, then W)" in "".join(capsys.readouterr())
