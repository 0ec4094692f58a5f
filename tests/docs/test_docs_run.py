"""Every command and every block that README and docs print, in both languages, run as a reader would type them.

    python -m pytest tests/docs -q --durations=10

What is not run is in ``docs_exceptions.py``, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from _pytest.mark import ParameterSet
from docs_exceptions import BEFORE, EXIT_CODES, NOT_HERE
from docs_reading import PAGES, ROOT, Block, blocks
from docs_running import Reader

from programs import PACKAGES, needs
from vpipe.config import load

EVERY = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in EVERY if block.language == "sh"]
FIRST = (
    "vpipe data build code --out data/code",
    "vpipe data build bert --out data/bert",
    "vpipe train configs/default.yaml --output-dir runs/resumed",
    "vpipe profile configs/default.yaml -o profile.json -o graph.txt",
    "vpipe init job.yaml",
    *(f"vpipe draw 1f1b -p 4 -m 8 -o {name}.csv" for name in ("my", "my_schedule", "schedule")),
)
"""What the pages presuppose: a data set, a run, a profile, a config, a schedule in a file."""
DONE: set[str] = set()
"""Commands that have been run: each is run once, wherever it is printed."""
MODEL = """
import transformers
transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
)).save_pretrained("path/to/model")
"""


def not_here(command: str) -> str:
    """Why a command is not run; empty where it is."""
    return next((why for pattern, why in NOT_HERE.items() if re.fullmatch(pattern, command)), "")


def programs(block: Block) -> set[str]:
    """The programs that its commands start."""
    return {
        word for line in block.lines if not not_here(line) for word in re.findall(r"[\w.-]+", line)
    } & PACKAGES.keys()


def _case(block: Block) -> ParameterSet:
    names = programs(block)
    return pytest.param(block, marks=needs(*names) if names else (), id=str(block))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("reader") / "clone"
    folder.mkdir()
    reader = Reader(folder)
    try:
        for line in FIRST:
            assert reader.command(line)[0] == 0, (line, reader.out.read_text())
            DONE.add(line)
        assert reader.python(MODEL, "path/to/model")[0] == 0, reader.out.read_text()
        for block in EVERY:
            if block.file:
                (folder / block.file).write_text(block.text)
        yield reader
    finally:
        reader.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("block", [_case(block) for block in SHELL])
def test_commands(reader: Reader, block: Block) -> None:
    """Each once, wherever it is printed; what a page says behind a simulation is what it prints."""
    skipped = [line for line in block.lines if not_here(line)]
    if len(skipped) == len(block.lines):
        pytest.skip(not_here(skipped[0]))
    for line, comment in zip(block.lines, block.comments, strict=True):
        if line in DONE and not line.startswith("vpipe simulate"):
            continue
        if not not_here(line):
            assert line not in BEFORE or reader.command(BEFORE[line])[0] == 0
            code, said = reader.command(line)
            assert code == EXIT_CODES.get(line, 0), f"{line}\n{said}"
            assert "Traceback" not in said
            DONE.add(line)
            if line.startswith("vpipe simulate"):
                agrees(comment, said)


def agrees(comment: str, said: str) -> None:
    """``makespan 33, peak activations 4 3 2 1`` behind a command: its output has these figures."""
    for figure in re.findall(r"makespan (\d[\d.]*)", comment) + re.findall(r"^(\d[\d.]*)$", comment):
        assert re.search(rf"makespan +{re.escape(figure)}\b", said), (comment, said)
    for several in re.findall(r"(?<!\d)\d+(?: \d+){3}(?!\d)", comment):
        assert re.search(rf"(?<!\d){several}(?!\d)", said), (comment, said)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("block", [each for each in EVERY if each.language == "python"], ids=str)
def test_python(reader: Reader, block: Block) -> None:
    code, said = reader.python(block.text, str(block))
    assert code == 0, said


@pytest.mark.parametrize("block", [each for each in EVERY if each.language == "yaml"], ids=str)
def test_yaml(block: Block, tmp_path: Path) -> None:
    """A config loads; a part of one loads beside a model and data."""
    whole = {"model": {"name": "gpt"}, "dataset": {"name": "synthetic"}} | yaml.safe_load(block.text)
    whole.pop("plugins", None)
    if "machines" in whole.get("launch", {}):
        whole["parallel"] = {"model_parallel_size": len(whole["launch"]["machines"])}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(whole))
    load(tmp_path / "job.yaml")


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("block", [each for each in EVERY if each.language == "yaml" and each.file], ids=str)
def test_jobs_train(reader: Reader, block: Block) -> None:
    code, said = reader.command(f"vpipe train {block.file}")
    assert code == 0, said


def test_every_language_is_known_and_no_exception_is_stale() -> None:
    assert {block.language for block in EVERY} <= {"sh", "python", "yaml"}
    lines = [line for block in SHELL for line in block.lines]
    assert len(set(lines)) > 80
    assert [each for each in NOT_HERE if not any(re.fullmatch(each, line) for line in lines)] == []
    assert [each for each in EXIT_CODES if each not in lines] == []
    assert sum(bool(not_here(line)) for line in set(lines)) < len(set(lines)) / 2


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert "://" in link or (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"
