"""A model, a data set and a schedule of one's own train through ``vpipe train``; the documented examples are these."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from train_runs import Run, equal, run, tiny

import forked_python
from vpipe.cli import parity, plan, submit
from vpipe.cli import train as cli
from vpipe.errors import UserError
from vpipe.interfaces import DatasetInterface, ModelInterface, StageInterface
from vpipe.registry import DATASET_REGISTRY, MODEL_REGISTRY, SCHEDULE_REGISTRY, STAGE_REGISTRY, load_plugins
from vpipe.runtime.moves import layer_state

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """What a test registers is gone after it."""
    every = (MODEL_REGISTRY, DATASET_REGISTRY, SCHEDULE_REGISTRY, STAGE_REGISTRY)
    before = [dict(registry._entries) for registry in every]
    yield
    for registry, entries in zip(every, before, strict=True):
        registry._entries = entries


def code_blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


class Numbers(DatasetInterface):
    """Sixteen numbers a row; the label is their double."""

    def load_dataset(self) -> Sequence[Any]:
        generator = torch.Generator().manual_seed(0)
        return list(torch.randn(40, 16, generator=generator))

    def process_batch(self, batch: Any) -> Mapping[str, Any]:
        rows = torch.stack(batch)
        return {"inputs": rows, "labels": rows.abs() * 2}

    def get_vocab_size(self) -> int:
        return 1


class Squares(StageInterface):
    def compute_loss(self, output: Any, labels: Any) -> torch.Tensor:
        loss: torch.Tensor = nn.functional.mse_loss(output, labels)
        return loss


def train(config: dict[str, Any], directory: Path) -> list[float]:
    """Through the command line, in this process."""
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump(config))
    assert cli.command.main([str(file), "--output-dir", str(directory / "run")], standalone_mode=False) == 0
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_the_documented_schedule_trains(tmp_path: Path) -> None:
    (schedule,) = (block for block in code_blocks("CONTRIBUTING.md") if "SCHEDULE_REGISTRY" in block)
    exec(compile(schedule, "CONTRIBUTING.md", "exec"), {})  # noqa: S102 - our own page
    found = train(tiny({"parallel.scheduler": "one-at-a-time"}), tmp_path)
    expected = run(tiny({"parallel.scheduler": "1f1b"}), tmp_path / "1f1b")
    assert found == expected.losses, "another order, the same numbers"


def test_the_documented_model_trains(tmp_path: Path) -> None:
    (model,) = (block for block in code_blocks("CONTRIBUTING.md") if "MODEL_REGISTRY" in block)
    exec(compile(model, "CONTRIBUTING.md", "exec"), {})  # noqa: S102 - our own page
    DATASET_REGISTRY.register("numbers")(Numbers)
    STAGE_REGISTRY.register("mlp")(Squares)
    config = tiny(
        model={"name": "mlp", "num_layers": 3, "hidden_size": 16},
        dataset={"name": "numbers", "extra": {}},
        training={"epochs": 8},
    )
    losses = train(config, tmp_path)
    assert losses[-1] < losses[0]


def test_the_documented_data_set_trains(tmp_path: Path) -> None:
    (data,) = (block for block in code_blocks("CONTRIBUTING.md") if "DATASET_REGISTRY" in block)
    exec(compile(data, "CONTRIBUTING.md", "exec"), {})  # noqa: S102 - our own page
    losses = train(tiny(dataset={"name": "counting", "extra": {}}, training={"epochs": 12}), tmp_path)
    assert losses[-1] < 0.7 * losses[0], "counting can be learnt"


def test_a_model_says_where_it_is_cut(tmp_path: Path) -> None:
    @MODEL_REGISTRY.register("uneven")
    class Uneven(ModelInterface):
        def get_model_config(self) -> dict[str, dict[str, Any]]:
            return {f"layer_{index}": {} for index in range(4)}

        def create_layer(self, layer_type: str, params: dict[str, Any]) -> nn.Module:
            return nn.Linear(16, 16)

        def get_stage_partition(self, num_stages: int) -> list[list[int]]:
            return [[0, 1, 2], [3]]

    DATASET_REGISTRY.register("numbers")(Numbers)
    STAGE_REGISTRY.register("uneven")(Squares)
    found = run(tiny(model={"name": "uneven"}, dataset={"name": "numbers", "extra": {}}), tmp_path)
    assert found.trainer.session.pipeline.partition == [3, 1]


def test_a_layer_without_tensors_is_in_checkpoints(tmp_path: Path) -> None:
    """Such a layer had no file, and no checkpoint of its model could be read."""

    @MODEL_REGISTRY.register("bent")
    class Bent(ModelInterface):
        def get_model_config(self) -> dict[str, dict[str, Any]]:
            return {f"layer_{index}": {"linear": index % 2} for index in range(4)}

        def create_layer(self, layer_type: str, params: dict[str, Any]) -> nn.Module:
            return nn.Linear(16, 16) if params["linear"] else nn.Tanh()

    DATASET_REGISTRY.register("numbers")(Numbers)
    STAGE_REGISTRY.register("bent")(Squares)
    changes = {"model": {"name": "bent"}, "dataset": {"name": "numbers", "extra": {}}, "checkpoint": {"interval": 3}}
    whole = run(tiny(**changes), tmp_path / "whole")
    run(tiny(**changes, training={"max_iterations": 3}), tmp_path / "first")
    again = Run(tiny(**changes), tmp_path / "again", resume=tmp_path / "first").train()
    assert equal(again.weights, whole.weights)


@pytest.mark.parametrize("kind", [torch.Generator, random.Random, np.random.default_rng, np.random.RandomState])
def test_a_resumed_run_draws_on_from_a_layers_own_generator(kind: Callable[[], Any], tmp_path: Path) -> None:
    """It drew from the generator's beginning. A checkpoint without its state says so."""

    class Noisy(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.generator = kind().manual_seed(1) if kind is torch.Generator else kind(1)  # type: ignore[call-arg]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if kind is torch.Generator:
                return super().forward(x) + 0.1 * torch.randn(x.shape, generator=self.generator)
            draw = self.generator.gauss if kind is random.Random else self.generator.normal
            return super().forward(x) + 0.1 * draw(0, 1)

    @MODEL_REGISTRY.register("noisy")
    class Model(ModelInterface):
        def get_model_config(self) -> dict[str, dict[str, Any]]:
            return {f"layer_{index}": {"noisy": index == 2} for index in range(4)}

        def create_layer(self, layer_type: str, params: dict[str, Any]) -> nn.Module:
            return Noisy() if params["noisy"] else nn.Linear(16, 16)

    DATASET_REGISTRY.register("numbers")(Numbers)
    STAGE_REGISTRY.register("noisy")(Squares)
    changes = {"model": {"name": "noisy"}, "dataset": {"name": "numbers", "extra": {}}, "checkpoint": {"interval": 3}}
    through = run(tiny(**changes), tmp_path / "through")
    sixth = tmp_path / "through" / "checkpoints" / "iteration-000006"
    again = run(tiny(**changes), tmp_path / "again", resume=sixth)
    assert again.losses == through.losses[6:]
    assert equal(again.weights, through.weights)
    module = again.trainer.session.pipeline.modules()[2]
    with pytest.warns(UserWarning, match=r"no state of the generator 'generator' of Noisy was kept: it begins anew"):
        layer_state.load_into(module, None, {})
    with pytest.raises(UserError, match=r"'generator' of Noisy is not the state of a .*give the layer the kind of"):
        layer_state.load_into(module, None, {"generator/.generator": torch.zeros(3, dtype=torch.uint8)})


def test_documents_are_python() -> None:
    for document in ("CONTRIBUTING.md", "docs/training.md", "docs/from-ourgpipe.md"):
        for block in code_blocks(document):
            compile(block, document, "exec")
    assert sys.version_info >= (3, 11)


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([forked_python.program(), "-m", *words], cwd=cwd, capture_output=True, text=True, timeout=200)


def losses(run_directory: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.rotates(1, of="pages")
@pytest.mark.slow
def test_the_example_of_ourgpipes_page_runs_as_printed_and_under_torchrun(
    documented_job: Callable[[Path], Path], tmp_path: Path
) -> None:
    job = documented_job(tmp_path)
    done = command("vpipe", "train", "my_job.yaml", "--output-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]
    (tmp_path / "elsewhere").mkdir()
    torchrun = ("torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m", "vpipe", "train")
    done = command(*torchrun, str(job), "--output-dir", str(tmp_path / "second"), cwd=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "second") == found


@pytest.mark.slow
def test_a_plugin_of_the_command_line_reaches_ranks_and_the_queue(
    documented_job: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = documented_job(tmp_path)
    text = job.read_text().replace("plugins: [my_model.py]\n", "")
    job.write_text(text.replace("scheduler: 1f1b", "scheduler: 1f1b, transport: inprocess"))
    file = (tmp_path / "my_model.py").rename(tmp_path / "other_name.py")
    given = ["--plugin", str(file)]
    run_at = tmp_path / "run"
    with pytest.raises(UserError, match=r"next_letter|letters"):
        cli.command.main([str(job), "--output-dir", str(tmp_path / "none")], standalone_mode=False)
    assert cli.command.main([str(job), *given, "--output-dir", str(run_at)], standalone_mode=False) == 0
    assert losses(run_at)
    kept = yaml.safe_load((run_at / "config.yaml").read_text())
    assert kept["plugins"] == [str(file)], "the resolved config stands by itself"
    capsys.readouterr()
    assert submit.command.main([str(job), *given, "--dry-run"], standalone_mode=False) == 0
    assert str(file) in capsys.readouterr().out
    assert parity.command.main([str(job), *given, "--steps", "1"], standalone_mode=False) == 0
    words = ["-p", "2", "--scheduler", "1f1b", "-o", str(tmp_path / "plan.json")]
    capsys.readouterr()
    assert plan.command.main([str(job), *given, *words], standalone_mode=False) == 0
    assert f'plugins=["{file}"]' in capsys.readouterr().out, "the command that it proposes has the plugin"


def test_a_plugin_that_fails_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    cases = {
        "x = 1\ny = 1 / 0\n": r"broken\.py, line 2 fails: ZeroDivisionError: division by zero",
        "def f(:\n": r"broken\.py, line 1 fails: SyntaxError",
        "import no_such_thing_at_all\n": "No module named 'no_such_thing_at_all'",
    }
    for text, words in cases.items():
        file.write_text(text)
        with pytest.raises(UserError, match=words) as caught:
            load_plugins([str(file)])
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="does not exist"):
        load_plugins([str(tmp_path / "nowhere.py")])


def test_a_plugin_imports_its_neighbours_and_brings_a_schedule(tmp_path: Path) -> None:
    (schedule,) = (block for block in code_blocks("CONTRIBUTING.md") if "SCHEDULE_REGISTRY" in block)
    (tmp_path / "neighbour_of_mine.py").write_text("NAME = 'one-at-a-time'\n")
    (tmp_path / "mine.py").write_text("from neighbour_of_mine import NAME\n" + schedule)
    config = {**tiny({"parallel.scheduler": "one-at-a-time"}), "plugins": ["mine.py"]}
    assert train(config, tmp_path)


def test_the_registries_list_what_is_built_in() -> None:
    code = (
        "import sys; from vpipe.registry import *; "
        "print(*MODEL_REGISTRY, *DATASET_REGISTRY, *SCHEDULE_REGISTRY); "
        "assert 'gpt' in MODEL_REGISTRY and 'text' in DATASET_REGISTRY and '1f1b' in SCHEDULE_REGISTRY; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"gpt", "huggingface", "synthetic", "zb-h1"} <= set(done.stdout.split())
    assert callable(MODEL_REGISTRY.get("gpt"))
    assert callable(DATASET_REGISTRY.get("text"))


@pytest.mark.rotates(1, of="pages")
@pytest.mark.slow
def test_the_page_of_hugging_face_runs_as_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    python, pictures = code_blocks("docs/huggingface.md")
    scope: dict[str, Any] = {}
    exec(compile(python, "docs/huggingface.md", "exec"), scope)  # noqa: S102 - our own page
    assert scope["loss"] > 0
    (job,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/huggingface.md").read_text(), re.DOTALL)
    (tmp_path / "pictures.py").write_text(pictures)
    (tmp_path / "vit.yaml").write_text(job)
    words = [str(tmp_path / "vit.yaml"), "--set", "launch.threads=1", "--output-dir", str(tmp_path / "run")]
    capfd.readouterr()
    assert cli.command.main(words, standalone_mode=False) == 0  # two processes
    found = losses(tmp_path / "run")
    assert found[-1] < found[0], "light and dark pictures can be told apart"
    said = [line for line in capfd.readouterr().err.splitlines() if "[transformers]" in line]
    assert len(said) == len(set(said)), "a warning of transformers is shown once"
