"""``vpipe init``: what it writes trains, and nothing is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from vpipe import config as configs
from vpipe.cli import init, train
from vpipe.errors import UserError

IN_PROCESS = [
    "--set",
    "parallel.transport=inprocess",
    "--set",
    "training.max_iterations=1",
    "--set",
    "launch.threads=1",
]


def made(folder: Path, *words: str) -> Path:
    file = folder / "job.yaml"
    assert init.command.main([str(file), *words], standalone_mode=False) == 0
    return file


def trains(file: Path) -> None:
    run = file.parent / "run"
    assert train.command.main([str(file), *IN_PROCESS, "--output-dir", str(run)], standalone_mode=False) == 0
    assert (run / "metrics.jsonl").read_text().strip()


def test_the_plain_one_trains_and_is_never_overwritten(tmp_path: Path) -> None:
    file = made(tmp_path)
    before = file.read_text()
    with pytest.raises(UserError, match="exists and is not overwritten"):
        init.command.main([str(file)], standalone_mode=False)
    assert file.read_text() == before
    assert sum("#" in line for line in before.splitlines()) > 8, "it explains itself"
    assert not configs.load(file).warnings
    trains(file)


@pytest.mark.parametrize(
    "text",
    [
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))\n",
        "from torch import nn\nlayers = [nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 3)]\n",
        "from torch import nn\nclass Net(nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3600, 2))\n",
    ],
    ids=["function", "list", "class"],
)
def test_a_file_with_a_torch_model_trains(tmp_path: Path, text: str, request: pytest.FixtureRequest) -> None:
    source = tmp_path / f"net_{request.node.callspec.id}.py"
    source.write_text(text)
    trains(made(tmp_path, "--from-torch", str(source)))


def test_a_file_that_registers_is_a_plugin(tmp_path: Path) -> None:
    source = tmp_path / "registering.py"
    source.write_text(
        "from vpipe.registry import DATASET_REGISTRY, MODEL_REGISTRY\n"
        "@MODEL_REGISTRY.register('init_model')\nclass M: pass\n"
        "@DATASET_REGISTRY.register('init_data')\nclass D: pass\n"
    )
    values = yaml.safe_load(made(tmp_path, "--from-torch", str(source)).read_text())
    assert values["plugins"] == ["registering.py"]
    assert (values["model"]["name"], values["dataset"]["name"]) == ("init_model", "init_data")


def test_a_file_without_a_model_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "nothing_here.py"
    source.write_text("x = 1\n")
    with pytest.raises(UserError, match=r"has no nn\.Sequential"):
        made(tmp_path, "--from-torch", str(source))
    assert not (tmp_path / "job.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral", "roberta", "t5", "bart"])
def test_a_type_of_transformers_trains(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("transformers")
    trains(made(tmp_path, "--huggingface", kind))


@pytest.mark.slow
def test_a_directory_of_transformers_trains_from_its_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**small)).save_pretrained(tmp_path / "hub")
    file = made(tmp_path, "--huggingface", str(tmp_path / "hub"))
    assert yaml.safe_load(file.read_text())["model"]["directory"] == "hub"
    trains(file)
    for words, told in (
        ("path/to/model", r"nothing is downloaded here.*path/to/model'$"),
        ("vit", "no built-in data set"),
    ):
        with pytest.raises(UserError, match=told):
            init.command.main([str(tmp_path / "other.yaml"), "--huggingface", words], standalone_mode=False)
