"""A save that is cut off at any system call, and checkpoints that are damaged in any way: always resumable, always noticed.

``python tests/train/test_train_crash.py --corruptions 1000 --crashes all`` runs the full counts.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vpipe.rundir.lineage import Line
from vpipe.rundir.manifest import CheckpointManifest, DamagedCheckpoint, Standing, find, on_line
from vpipe.train.checkpoints import layer_file
from vpipe.train.checkpoints.checkpoint import Checkpoint
from vpipe.train.checkpoints.writer import CheckpointPlace, Save, Saver

RUN = Line("a" * 12)
CALLS = "openat,write,fsync,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat"
"""What a save does to the disk."""


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"param/w": torch.full((4, 3), value), "optimizer/w/step": torch.tensor(value)}


def save(
    directory: Path, iteration: int, *, keep: int = 1, process: int = 0, num_processes: int = 1, line: Line = RUN
) -> Save:
    """This process's part of a checkpoint of two layers a process; every number in it is the iteration."""
    standing = Standing(iteration, 0, 0, 0, iteration, 1.0, 0, 0, "adam", "m")
    saver = Saver(CheckpointPlace(directory, process, num_processes, keep), blocking=True)
    made = Save(standing, line, {})
    first = 2 * process
    saver.begin(made, {layer: tensors(float(iteration)) for layer in (first, first + 1)})
    return made


def resumable(directory: Path) -> int:
    """The iteration of the newest checkpoint that is whole; every tensor in it is of that iteration."""
    for path in find(directory):
        try:
            found = Checkpoint.open(path)
            layers = [found.read(layer) for layer in range(len(found.files))]
        except DamagedCheckpoint:
            continue
        values = {float(value) for layer in layers for tensor in layer.values() for value in tensor.flatten()}
        assert values == {float(found.standing.iteration)}, f"{path} is a mixture: {values}"
        return found.standing.iteration
    raise AssertionError(f"nothing in {directory} is whole")


CHILD = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
import test_train_crash as crash
print("ready", flush=True)
open("/dev/null").close()
sys.stdin.readline()
crash.save(Path(sys.argv[1]), int(sys.argv[2]))
"""


def crash(directory: Path, iteration: int, number: int | None) -> int:
    """Save under strace; the call of that number never happens, the process is killed. How many calls there were."""
    log = directory / "strace.txt"
    inject = ["-e", f"inject={CALLS}:signal=SIGKILL:when={number}"] if number else []
    words = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={CALLS}", *inject]
    with subprocess.Popen(
        [sys.executable, "-c", CHILD.format(here=str(Path(__file__).parent)), str(directory / "kept"), str(iteration)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        tracer = subprocess.Popen([*words, "-p", str(child.pid)])
        while not _traced(child.pid):
            assert tracer.poll() is None, "strace cannot attach"
        child.stdin.write("\n")
        child.stdin.close()
        child.wait(60)
        tracer.wait(60)
    return len(re.findall(r"^\d+ +\w+\(", log.read_text(), re.MULTILINE))


def _traced(pid: int) -> bool:
    return "TracerPid:\t0" not in Path(f"/proc/{pid}/status").read_text()


def crashes(folder: Path, chosen: Callable[[int], list[int]]) -> tuple[int, int]:
    """Crash at the chosen system calls of a save; how many calls it has, and how many crashes were resumable."""
    save(folder / "whole" / "kept", 5)
    num_calls = crash(folder / "whole", 6, None)
    assert resumable(folder / "whole" / "kept") == 6
    numbers = chosen(num_calls)
    for number in numbers:
        place = folder / f"at{number}"
        save(place / "kept", 5)
        crash(place, 6, number)
        reached = resumable(place / "kept")
        assert reached in (5, 6)
        after = save(
            place / "kept", 7, line=RUN.child("b" * 12, reached)
        )  # and what the crash has left is no hindrance
        assert after.path is not None, after.problem
        assert resumable(place / "kept") == 7
        left = sorted(path.name for path in (place / "kept").iterdir())
        assert left == ["iteration-000007"], left
        shutil.rmtree(place)
    return num_calls, len(numbers)


def several(directory: Path) -> None:
    """Checkpoints 3 and 4 of two processes with two layers each."""
    for iteration in (3, 4):
        late = Saver(CheckpointPlace(directory, 0, 2, 9))
        made = Save(Standing(iteration, 0, 0, 0, iteration, 1.0, 0, 0, "adam", "m"), RUN, {})
        late.begin(made, {layer: tensors(float(iteration)) for layer in (0, 1)})
        save(directory, iteration, process=1, num_processes=2)
        late.wait()
        assert made.path is not None, made.problem


def corrupt(directory: Path, dice: random.Random) -> str:
    """Damage the newest checkpoint in one way; what was done."""
    new, old = directory / "iteration-000004", directory / "iteration-000003"
    file = dice.choice(sorted(new.iterdir()))
    data = bytearray(file.read_bytes())
    way = dice.choice(["bit", "bits", "cut", "grow", "zeros", "swap", "mixture", "missing"])
    if way in ("bit", "bits"):
        for _ in range(1 if way == "bit" else 5):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif way == "cut":
        data = data[: dice.randrange(len(data))]
    elif way == "grow":
        data += bytes(dice.randrange(1, 99))
    elif way == "zeros":
        begin = dice.randrange(len(data))
        data[begin : begin + 16] = bytes(b ^ 255 for b in data[begin : begin + 16])
    elif way == "swap":
        layers = dice.sample(sorted(new.glob("layer-*")), 2)
        first, second = (path.read_bytes() for path in layers)
        layers[0].write_bytes(second)
        layers[1].write_bytes(first)
        return f"{way} {layers}" if first != second else ""
    elif way == "mixture":
        data = bytearray((old / file.name).read_bytes())
    elif way == "missing":
        file.unlink()
        return f"{way} {file.name}"
    if bytes(data) == file.read_bytes():
        return ""
    file.write_bytes(data)
    return f"{way} {file.name}"


def corruptions(folder: Path, count: int, seed: int = 0) -> int:
    """Damage a checkpoint of several processes again and again; how many were noticed."""
    several(folder / "whole")
    dice, noticed = random.Random(seed), 0
    while noticed < count:
        place = folder / "damaged"
        shutil.copytree(folder / "whole", place)
        what = corrupt(place, dice)
        if what:
            assert resumable(place) == 3, what
            noticed += 1
        shutil.rmtree(place)
    return noticed


def test_damage_of_every_kind_is_noticed(tmp_path: Path) -> None:
    assert corruptions(tmp_path, 120) == 120


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_crash_at_a_system_call_of_a_save_is_resumable(tmp_path: Path) -> None:
    num_calls, tried = crashes(tmp_path, lambda count: [count - 18, count - 12, count - 7, count - 2])
    assert num_calls > 15
    assert tried == 4


def test_a_checkpoint_holds_what_was_there_at_its_step(tmp_path: Path) -> None:
    """Training goes on while it is written: the copy does not move with it."""
    live = tensors(5.0)
    saver = Saver(CheckpointPlace(tmp_path, 0, 1, 2))
    made = Save(Standing(5, 0, 0, 0, 5, 1.0, 0, 0, "adam", "m"), RUN, {})
    saver.begin(made, {0: live, 1: tensors(5.0)})
    live["param/w"].fill_(99.0)
    saver.wait()
    assert resumable(tmp_path) == 5


def test_safetensors_reads_what_we_write(tmp_path: Path) -> None:
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool)
    given = {f"t{n}": torch.ones(2, 0 if n == 3 else 3, dtype=kind) for n, kind in enumerate(kinds)}
    given["scalar"] = torch.tensor(2.5)
    given["turned"] = torch.arange(6.0).reshape(2, 3).t()
    facts = layer_file.write(tmp_path / "layer-0000.safetensors", given)
    back = layer_file.read(tmp_path / "layer-0000.safetensors", facts)
    assert back.keys() == given.keys()
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in given.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--corruptions", type=int, default=1000)
    parser.add_argument("--crashes", default="all")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as scratch:
        noticed = corruptions(Path(scratch) / "c", chosen.corruptions)
        print(f"{noticed} corruptions, all noticed", flush=True)
        picks = (lambda n: list(range(1, n + 1))) if chosen.crashes == "all" else (lambda n: list(range(1, n, 7)))
        calls, done = crashes(Path(scratch) / "k", picks)
        print(f"a save makes {calls} system calls; killed at {done} of them, always resumable")
        assert on_line(Path(scratch) / "c" / "whole", RUN)
        assert CheckpointManifest
