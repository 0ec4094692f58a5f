"""What README prints is what a reader sees."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from vpipe.cli.main import cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """Every ``vpipe …`` that README prints in full, in blocks and in lines."""
    found = re.findall(r"`(vpipe [a-z]+ [^`]+)`", README) + re.findall(r"^\$ (vpipe .+)$", README, re.M)
    return [words for words in found if "COMMAND" not in words]


def test_the_picture_is_what_the_command_draws(vpipe: Any) -> None:
    shown = re.search(r"```\n\$ vpipe (draw [^\n]+)\n(.*?)```", README, re.S)
    assert shown is not None
    assert vpipe(*shown[1].split()).stdout == shown[2]


def test_pictures_and_pages_are_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", README) if "://" not in link]
    assert "docs/pictures/report-light.png" in links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_a_reader_is_told_how_the_command_comes_into_the_shell(name: str) -> None:
    """The two commands make an environment that no shell has entered: the next line of the page was 'not found'."""
    text = (ROOT / name).read_text(encoding="utf-8").partition("scripts/quickstart")[2]
    assert "source .venv/bin/activate" in text.partition("`vpipe ")[0]


@pytest.mark.parametrize("line", commands())
def test_every_command_has_the_arguments_that_it_needs(line: str) -> None:
    """Parsed, not run: a required option that README leaves out, or one that does not exist, is an error here."""
    _, name, *words = shlex.split(line)
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    command.make_context(name, words)


def test_the_code_block_trains_as_it_is() -> None:
    block = re.search(r"```python\n(.*?)```", README, re.S)
    assert block is not None
    losses: list[Any] = []
    code = block[1].replace("range(20)", "range(3)").rstrip() + "\n    losses.append(loss)\n"
    exec(compile(code, "README.md", "exec"), {"losses": losses})  # noqa: S102
    assert len(losses) == 3
    assert torch.isfinite(torch.tensor(losses)).all()
