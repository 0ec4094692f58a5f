"""What others on the machine can do to a run: not read its store, not end it, not write on its owner's terminal."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from running import Running, vpipe_run

from vpipe.errors import printable
from vpipe.runtime.ranks.failure import Board, Cause
from vpipe.runtime.ranks.secret import Sealed, prefix

pytestmark = pytest.mark.timeout(200)

SCRIPT = """
import os, sys, time
from pathlib import Path
from vpipe.runtime import assembly
assembly.join(60.0)
print("joined at", os.environ["MASTER_PORT"], flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
print("done", flush=True)
"""


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[tuple[Running, Path]]:
    """Two ranks that have met and wait for a file."""
    script, gate = tmp_path / "script.py", tmp_path / "gate"
    script.write_text(SCRIPT)
    run = vpipe_run(tmp_path, 2, str(script), str(gate), python=sys.executable)
    run.until("joined at")
    yield run, gate
    run.kill_all()


@pytest.mark.slow
def test_a_stranger_at_the_store_ends_nothing_and_prints_nothing(waiting: tuple[Running, Path]) -> None:
    run, gate = waiting
    port = int(run.out.split("joined at ")[1].split()[0])
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=10), wait_for_workers=False)
    forged = json.dumps({"rank": 1, "kind": "gone", "sentence": "\x1b[2Jhello", "by": 1})
    for generation in (".0", ".0/open"):
        store.set(f"vpipe/{generation}/end", forged)
        assert not store.check([f"vpipe/{generation}/join/0"]), "who the ranks are is not to be read"
    run.process.poll()
    gate.touch()
    assert run.wait() == 0, run.err
    assert "hello" not in run.out + run.err
    assert "\x1b" not in run.out + run.err


@pytest.mark.slow
def test_a_stopped_zygote_is_woken(waiting: tuple[Running, Path]) -> None:
    run, gate = waiting
    zygote = next(
        child for child in psutil.Process(run.process.pid).children() if "zygote" in " ".join(child.cmdline())
    )
    zygote.send_signal(signal.SIGSTOP)
    gate.touch()
    assert run.wait() == 0, run.err
    assert "had been stopped; it goes on" in run.err


class Memory(dict[str, Any]):
    """A store in memory, as torch's."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return bytes(self[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def compare_set(self, key: str, _: str, value: str) -> bytes:
        return bytes(self.setdefault(key, value.encode()))

    def add(self, key: str, number: int) -> int:
        self[key] = self.get(key) if isinstance(self.setdefault(key, 0), bytes) else self[key] + number
        return int(self[key])


def test_a_value_that_is_not_sealed_for_its_key_is_not_there() -> None:
    memory = Memory()
    ours, theirs = Sealed(memory, "secret"), Sealed(memory, "another")
    ours.set("a", "word")
    assert ours.get("a") == "word"
    assert theirs.get("a") is None
    memory["b"] = memory["a"]
    assert ours.get("b") is None, "a seal is for one key"
    theirs.set("c", "forged")
    assert ours.get_if_there("c") is None
    assert ours.set_once("c", "first") == "first"
    assert ours.set_once("c", "second") == "first"


def test_a_forged_end_is_none() -> None:
    memory = Memory()
    board = Board(memory, 0, "secret")
    memory.set("end", "{}")
    assert board.read() is None
    cause = Cause(1, "gone", "rank 1 is gone", 0)
    assert board.post(cause) == cause
    assert Board(memory, 1, "secret").read() == cause
    memory.set("beat/1", "\x1b[31m")
    assert board.beat_of(1) == ""


def test_causes_from_the_wire_are_cleaned_and_typed() -> None:
    assert Cause.parse("[]") is None
    assert Cause.parse('{"rank": "x", "kind": "gone", "sentence": "", "by": 0}') is None
    found = Cause.parse(json.dumps({"rank": 1, "kind": "gone", "sentence": "a\x1b]0;title\x07b\nc", "by": 0}))
    assert found is not None
    assert found.sentence.isprintable()


def test_text_for_a_terminal() -> None:
    assert printable("a\tb\n c") == "a b c"
    assert printable("\x1b[2J\x9b\u202e").isprintable()
    assert printable("Grüße 世界") == "Grüße 世界"


def test_keys_cannot_be_guessed() -> None:
    assert prefix("one", "0") != prefix("two", "0")
    assert "one" not in prefix("one", "0")
