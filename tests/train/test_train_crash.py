"""A save that is cut off at any system call, and checkpoints that are damaged in any way: always resumable, always noticed.

``python tests/train/test_train_crash.py --corruptions 1000 --crashes all`` runs the full counts.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))  # also where this file is a command

import faulty_disk
import pytest
import torch
from safetensors.torch import load_file
from train_runs import tiny

from programs import needs
from vpipe.errors import UserError
from vpipe.rundir.lineage import Line
from vpipe.rundir.manifest import DamagedCheckpoint, Standing, find
from vpipe.train.checkpoints import layer_file
from vpipe.train.checkpoints.checkpoint import Checkpoint
from vpipe.train.checkpoints.writer import CheckpointPlace, Save, Saver

RUN = Line("a" * 12)
CALLS = "openat,write,fsync,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat"
"""What a save does to the disk."""


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"param/w": torch.full((4, 3), value), "optimizer/w/step": torch.tensor(value)}


def save(
    directory: Path,
    iteration: int,
    *,
    keep: int = 1,
    process: int = 0,
    num_processes: int = 1,
    line: Line = RUN,
    blocking: bool = True,
) -> Save:
    """This process's part of a checkpoint of two layers a process; every number in it is the iteration."""
    saver, made = begun(directory, iteration, process, num_processes, line, keep, blocking)
    saver.end()
    return made


def begun(
    directory: Path, iteration: int, process: int, num_processes: int, line: Line, keep: int = 1, blocking: bool = False
) -> tuple[Saver, Save]:
    """The same on its way, in the thread that a run has for it unless ``blocking``."""
    standing = Standing(iteration, 0, 0, (), 0, 0, iteration, 1.0, 0, 0, "adam", "m")
    saver = Saver(CheckpointPlace(directory, process, num_processes, keep), blocking=blocking)
    made = Save(standing, line, {})
    first = 2 * process
    saver.begin(made, lambda: {layer: tensors(float(iteration)) for layer in (first, first + 1)})
    return saver, made


def resumable(directory: Path) -> int:
    """The iteration of the newest checkpoint that is whole; every tensor in it is of that iteration."""
    for path in find(directory):
        try:
            found = Checkpoint.open(path)
            layers = [found.read(layer) for layer in range(len(found.manifest.files))]
        except DamagedCheckpoint:
            continue
        values = {float(value) for layer in layers for tensor in layer.values() for value in tensor.flatten()}
        assert values == {float(found.manifest.standing.iteration)}, f"{path} is a mixture: {values}"
        return found.manifest.standing.iteration
    raise AssertionError(f"nothing in {directory} is whole")


def crash(folder: Path, iteration: int, number: int | None, process: int, num_processes: int) -> int:
    """Save in the writing thread of a process under strace; its call of that number never happens, the process is
    killed. Another process of the run saves beside it. How many calls a thread made."""
    place, log = folder / "kept", folder / "strace.txt"
    if process == 0 and num_processes == 2:
        save(place, iteration, process=1, num_processes=2)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reader, 1)
        save(place, iteration, process=process, num_processes=num_processes, blocking=False)
        os._exit(0)
    inject = ["-e", f"inject={CALLS}:signal=SIGKILL:when={number}"] if number else []
    words = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={CALLS}", *inject, "-p", str(pid)]
    tracer = subprocess.Popen(words)
    while not _traced(pid):
        assert tracer.poll() is None, "strace cannot attach"
    leader = begun(place, iteration, 0, 2, RUN)[0] if process == 1 else None
    os.write(writer, b"x")
    os.waitpid(pid, 0)
    if leader is not None:  # a run whose rank is gone ends; what it has not said by then, it will not say
        leader.call_off()
        leader.end()
    tracer.wait(200)
    os.close(reader)
    os.close(writer)
    return max(Counter(re.findall(r"^(\d+) +\w+\(", log.read_text(), re.MULTILINE)).values())


def _traced(pid: int) -> bool:
    return "TracerPid:\t0" not in Path(f"/proc/{pid}/status").read_text()


def whole(place: Path, iteration: int, num_processes: int, line: Line = RUN) -> Save:
    """A save that nobody disturbs, by all processes."""
    if num_processes == 2:
        save(place, iteration, process=1, num_processes=2, line=line)
    return save(place, iteration, num_processes=num_processes, line=line, blocking=False)


def crashes(
    folder: Path, chosen: Callable[[int], list[int]], process: int = 0, num_processes: int = 1
) -> tuple[int, int]:
    """Crash at the chosen system calls of a save; how many calls it has, and how many crashes were resumable."""
    whole(folder / "whole" / "kept", 5, num_processes)
    num_calls = crash(folder / "whole", 6, None, process, num_processes)
    assert resumable(folder / "whole" / "kept") == 6
    numbers = chosen(num_calls)
    for number in numbers:
        place = folder / f"at{number}"
        whole(place / "kept", 5, num_processes)
        crash(place, 6, number, process, num_processes)
        reached = resumable(place / "kept")
        assert reached in (5, 6)
        # and what the crash has left is no hindrance
        after = whole(place / "kept", 7, num_processes, RUN.child("b" * 12, reached))
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
        made = Save(Standing(iteration, 0, 0, (), 0, 0, iteration, 1.0, 0, 0, "adam", "m"), RUN, {})
        late.begin(made, lambda iteration=iteration: {layer: tensors(float(iteration)) for layer in (0, 1)})
        save(directory, iteration, process=1, num_processes=2)
        late.end()
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
@needs("strace")
def test_a_crash_at_a_system_call_of_a_save_is_resumable() -> None:
    """In a process of its own: it forks."""
    words = [sys.executable, __file__, "--corruptions", "0", "--crashes", "4"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("killed at 4 of them, always resumable") == 3, done.stdout


ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE)
LOST = re.compile(r"warning: no checkpoint at iteration (\d+): (?:rank (\d): )?(.+?) \(")
"""Iteration, rank, reason."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_calls_times_errors_times_ranks(tmp_path: Path, vpipe: Any) -> None:
    """Two processes. In each save one call of one rank fails: the run goes on, and its last checkpoint is whole."""
    numbers = [(rank, call) for rank, most in ((0, 60), (1, 40)) for call in range(most)]
    faults = [(0, -1, 0)] * 2 + [(rank, call, error) for rank, call in numbers for error in ERRORS]
    last = len(faults) + 2
    changes = {"parallel.transport": "auto", "checkpoint.interval": 1, "training.max_iterations": last}
    job, plan, place = tmp_path / "job.json", tmp_path / "plan.json", tmp_path / "run"
    job.write_text(json.dumps(tiny(changes | {"training.epochs": last}) | {"plugins": [faulty_disk.__file__]}))
    plan.write_text(json.dumps(faults))
    done = vpipe("train", str(job), "--output-dir", str(place), timeout=250, FAULTS=str(plan))
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    names = sorted(path.name for path in (place / "checkpoints").iterdir())
    assert names == [f"iteration-{last - 1:06d}", f"iteration-{last:06d}"], names
    told = LOST.findall(said)
    assert {(rank, reason) for _, rank, reason in told} == {(r, os.strerror(e)) for r in "01" for e in ERRORS}
    assert len(told) > 150
    assert all(faults[int(iteration) - 1][0] == int(rank) for iteration, rank, _ in told), (
        "the rank that failed is named"
    )


def test_a_checkpoint_holds_what_was_there_at_its_step(tmp_path: Path) -> None:
    """Training goes on while it is written: the copy does not move with it."""
    live = tensors(5.0)
    saver = Saver(CheckpointPlace(tmp_path, 0, 1, 2))
    made = Save(Standing(5, 0, 0, (), 0, 0, 5, 1.0, 0, 0, "adam", "m"), RUN, {})
    saver.begin(made, lambda: {0: live, 1: tensors(5.0)})
    live["param/w"].fill_(99.0)
    saver.end()
    assert resumable(tmp_path) == 5


def test_every_number_comes_back(tmp_path: Path) -> None:
    """All that safetensors knows, and complex128 as pairs; safetensors itself reads the file."""
    kinds = [*layer_file._NAMES, torch.complex128]
    given = {f"t{n}": torch.ones(2, 0 if n == 3 else 3).to(kind) for n, kind in enumerate(kinds)}
    given["scalar"] = torch.tensor(2.5)
    given["turned"] = torch.arange(6.0).reshape(2, 3).t()
    given["conjugated"] = torch.tensor([1 + 2j], dtype=torch.complex128).conj()
    path = tmp_path / "layer-0000.safetensors"
    back = layer_file.read(path, layer_file.write(path, given))
    assert back.keys() == given.keys() == load_file(path).keys()
    for name, tensor in given.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].tolist() == tensor.tolist(), name


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_number_that_no_file_can_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="buffer/b is complex32, which a safetensors file cannot hold; keep it in"):
        layer_file.write(tmp_path / "layer-0000.safetensors", {"buffer/b": torch.ones(1, dtype=torch.complex32)})


WHO = {"one rank": (0, 1), "rank 0 of 2": (0, 2), "rank 1 of 2": (1, 2)}
"""Who is killed while it saves: (process, number of processes)."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--corruptions", type=int, default=1000)
    parser.add_argument("--crashes", default="all", help="How many of the system calls of a save, or all.")
    chosen = parser.parse_args()

    def picks(count: int) -> list[int]:
        wanted = count if chosen.crashes == "all" else int(chosen.crashes)
        return sorted({count - round(place * (count - 1) / max(1, wanted - 1)) for place in range(wanted)})

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as scratch:
        if chosen.corruptions:
            noticed = corruptions(Path(scratch) / "c", chosen.corruptions)
            print(f"{noticed} corruptions of checkpoints of two ranks, all noticed", flush=True)
        for who, (process, num_processes) in WHO.items():
            calls, done = crashes(Path(scratch) / who, picks, process, num_processes)
            print(f"{who}: a save makes {calls} system calls; killed at {done} of them, always resumable", flush=True)


if __name__ == "__main__":
    main()
