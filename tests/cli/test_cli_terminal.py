"""The other end of the line: narrow, dumb or full."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

import forked_python
from vpipe.cli.table import table
from vpipe.errors import nearest_file

VPIPE = [sys.executable, "-m", "vpipe"]


def on_terminal(*args: str, width: int = 80, python: str = sys.executable, **variables: str) -> str:
    """What a command writes to a terminal, both streams."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    child = subprocess.Popen(
        [python, "-m", "vpipe", *args], stdout=its, stderr=its, stdin=subprocess.DEVNULL, env=environment | variables
    )
    os.close(its)
    said = b""
    try:
        while part := os.read(ours, 65536):
            said += part
    except OSError:
        pass  # Linux's way to say that the other end is closed
    finally:
        os.close(ours)
    assert child.wait(timeout=60) == 0, said
    return said.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_catalogue_fits_the_terminal(width: int) -> None:
    said = on_terminal("schedules", width=width, TERM="xterm")
    assert max(map(len, said.splitlines())) <= width
    assert width < 80 or "interleaved-zb" in said, "a name is whole where there is room"


def test_the_ranking_fits_the_terminal() -> None:
    assert max(map(len, on_terminal("schedules", "--rank", "-p", "2", "-m", "2", TERM="dumb").splitlines())) <= 80


def test_a_pipe_has_one_line_a_schedule(vpipe: Any) -> None:
    assert any(
        line.startswith("interleaved ") and "divides m" in line for line in vpipe("schedules").stdout.splitlines()
    )


def test_a_dumb_terminal_gets_no_escape_codes() -> None:
    """A coloured picture; and a ranking, which has a bar."""
    for words in (["draw", "1f1b", "-p", "2", "-m", "2"], ["schedules", "--rank", "-p", "2", "-m", "2"]):
        assert "\x1b" in on_terminal(*words, TERM="xterm"), "else this test cannot fail"
        assert "\x1b" not in on_terminal(*words, TERM="dumb")


@pytest.mark.slow
def test_measuring_planning_and_checking_show_how_far_they_are(tmp_path: Path, vpipe: Any) -> None:
    """A bar with what is done now on a terminal; in a pipe, nothing beside the answer."""
    config, profile = tmp_path / "tiny.yaml", str(tmp_path / "profile.json")
    config.write_text(
        "model: {name: gpt, hidden_size: 16, num_layers: 2, num_heads: 2, sequence_length: 8}\n"
        "dataset: {name: synthetic, batch_size: 8, extra: {vocab_size: 64, num_examples: 32}}\n"
        "training: {num_microbatches: 4}\nparallel: {model_parallel_size: 2}\nlaunch: {threads: 1}\n"
    )
    python = forked_python.program()
    said = on_terminal("profile", str(config), "-o", profile, "--repeat", "20", python=python, TERM="xterm")
    assert "measuring" in said
    assert "messages and actions" in said
    plan = ("plan", str(config), "--profile", profile, "--scheduler", "1f1b", "--check")
    said = on_terminal(*plan, python=python, TERM="xterm")
    assert "planning" in said
    assert "checking" in said
    assert "\x1b" not in on_terminal(*plan, python=python, TERM="dumb")
    piped = vpipe(*plan)
    assert piped.returncode == 0
    assert not piped.stderr
    assert "checking" not in piped.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_sentence(unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*VPIPE, "simulate", "1f1b", "-p", "2", "-m", "2", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    assert done.stderr == "vpipe: standard output cannot be written: No space left on device\n"
    assert done.returncode == 74


def test_ctrl_c_while_python_imports_the_command_ends_quietly(tmp_path: Path) -> None:
    """It was a traceback in the first third of a second."""
    (tmp_path / "click.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    running = subprocess.Popen(
        [*VPIPE, "schedules"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "importing\n"
    running.send_signal(signal.SIGINT)
    assert running.communicate(timeout=30) == ("", "")
    assert running.returncode == 130


def test_words_are_cut_only_where_nothing_else_is_left() -> None:
    rows = [("name", "what it is"), ("interleaved", "a long story of many words")]
    assert table(rows) == "name         what it is\ninterleaved  a long story of many words"
    assert (
        table(rows, 24)
        == "name         what it is\ninterleaved  a long\n             story of\n             many words"
    )
    assert max(map(len, table(rows, 12).splitlines())) <= 12


def test_the_nearest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    for name in ("default.yaml", "gpt_small.yaml", "default.json"):
        (tmp_path / "configs" / name).touch()
    monkeypatch.chdir(tmp_path)
    for wrong in (
        "configs/defualt.yaml",
        "confgs/default.yaml",
        "default.yaml",
        "configs/default.yml",
        "configs/default",
    ):
        assert nearest_file(Path(wrong)) == "; did you mean configs/default.yaml?"
    assert nearest_file(Path("configs/gpt-small.yaml")) == "; did you mean configs/gpt_small.yaml?"
    Path("job.yaml").touch()
    assert nearest_file(Path("jbo.yaml")) == "; did you mean job.yaml?"
    assert nearest_file(Path("configs/nothing.yaml")) == ""
    assert nearest_file(Path("no/such/folder/default.yaml")) == ""


def test_a_config_that_does_not_exist(vpipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    done = vpipe("train", "configs/defualt.yaml")
    assert done.returncode == 2
    assert done.stderr == "vpipe: configs/defualt.yaml does not exist; did you mean configs/default.yaml?\n"
