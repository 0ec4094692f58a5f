"""The walk of one batch through the house: which files a line of code passes, and how often it changes the room.

    python benchmarks/house/walk.py              sizes of the house, and the walks of train, plan and Pipeline
    python benchmarks/house/walk.py --tree PATH  the same for another checkout (its src/ is used)
    python benchmarks/house/walk.py --files      with the files of each walk, in the order in which they are entered

A reader who follows a command opens a file for every module whose code runs. So the walk is counted as it happens, by
``sys.setprofile``: each walk has a process of its own, all ranks are threads of it, modules are imported beforehand (an
import is not a call) and the functions of all threads count, each once, in the order in which they are first entered.
A *switch* is a change of room between two that follow each other: how often a reader of one function after the other
changes the room; or, who opens each file once and reads there on, of one file after the other.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

CONFIG: dict[str, Any] = {
    "model": {"name": "gpt", "hidden_size": 16, "num_layers": 4, "num_heads": 2, "sequence_length": 8},
    "dataset": {"name": "synthetic", "batch_size": 8, "extra": {"vocab_size": 32, "num_examples": 32}},
    "training": {"num_microbatches": 4, "max_iterations": 1, "evaluation_interval": -1},
    "parallel": {"model_parallel_size": 2, "scheduler": "1f1b", "transport": "inprocess"},
    "checkpoint": {"interval": -1},
    "observe": {"trace": False},
    "launch": {"threads": 1},
}
LINE = "{} -- X() -- forward_compute_time=1, backward_compute_time=2, activation_size=10.0, parameter_size=4\n"
WALKS = ("train", "plan", "pipeline")


class Walk:
    """The functions of the house in the order in which they are first entered."""

    def __init__(self, house: Path) -> None:
        self._house = str(house) + os.sep
        self.functions: dict[tuple[str, str], None] = {}

    def __call__(self, frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # the body of a module or class is not
        if event == "call" and is_function and code.co_filename.startswith(self._house):
            self.functions.setdefault((code.co_filename[len(self._house) :], code.co_qualname))

    @property
    def steps(self) -> list[str]:
        """The file of each function, in the order in which they are first entered."""
        return [file for file, _ in self.functions]

    def __enter__(self) -> Walk:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def room(file: str) -> str:
    """The folder at the top of the house; a module of the hall is in none."""
    parts = Path(file).parts
    return parts[0] if len(parts) > 1 else ""


def switches(steps: list[str]) -> int:
    """Changes of room; the hall is on the way to every room and counts for none."""
    rooms = [room(file) for file in steps if room(file)]
    return sum(before != after for before, after in pairwise(rooms))


def walk(which: str, house: Path) -> list[str]:
    """Take one walk in this process, from the command on."""
    os.chdir(tempfile.mkdtemp())
    if which == "pipeline":
        return _pipeline(house)
    from vpipe.cli.main import main

    if which == "train":
        import vpipe.cli.train
        import vpipe.train.worker

        Path("job.yaml").write_text(json.dumps(CONFIG))
        words = ["train", "job.yaml", "--output-dir", "run"]
    else:
        import vpipe.cli.plan
        import vpipe.plan.planner  # noqa: F401

        Path("graph.txt").write_text("".join(LINE.format(n) for n in "abcdefgh") + "\ta -- b\n")
        words = ["plan", "graph.txt", "-p", "2", "-m", "4", "--json"]
    with open(os.devnull, "w") as nowhere, Walk(house) as found:
        sys.stdout, before = nowhere, sys.stdout
        try:
            main(words)
        except SystemExit as end:
            assert not end.code, f"the walk of {which} ended with {end.code}"
        finally:
            sys.stdout = before
    return found.steps


def _pipeline(house: Path) -> list[str]:
    """A user's own loop: a Pipeline of plain layers, one step."""
    import torch
    from torch import nn

    from vpipe import Pipeline

    layers = [nn.Linear(4, 4) for _ in range(4)]
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with Walk(house) as found:
        pipe = Pipeline(
            layers,
            nn.functional.mse_loss,
            num_ranks=2,
            num_microbatches=4,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
        pipe.train_step(x, y)
    return found.steps


def sizes(house: Path) -> dict[str, float]:
    """Files, their median length, and functions beyond 60 lines."""
    lines, functions, long = [], 0, 0
    for path in house.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if len(text.splitlines()) > 2:  # an empty __init__ is no file to read
            lines.append(len(text.splitlines()))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions += 1
                long += (node.end_lineno or 0) - node.lineno + 1 > 60
    return {
        "files": len(lines),
        "median lines": median(lines),
        "longest": max(lines),
        "functions": functions,
        "functions over 60 lines": long,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2], help="The checkout.")
    parser.add_argument("--files", action="store_true", help="Name the files of each walk.")
    parser.add_argument("--walk", choices=WALKS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    house = given.tree.resolve() / "src" / "vpipe"
    if given.walk:
        print(json.dumps(walk(given.walk, house)))
        return
    for name, value in sizes(house).items():
        print(f"{name:>24}  {value:g}")
    for which in WALKS:
        found = taken(which, given.tree.resolve())
        files = list(dict.fromkeys(found))
        told = f"{len(files)} files, {len(found)} functions, {switches(found)} switches of room"
        print(f"{which:>24}  {told}; opening each file once: {switches(files)}")
        for file in files if given.files else ():
            print(f"{'':>24}    {file}")


def taken(which: str, tree: Path) -> list[str]:
    """The walk, taken in a fresh process that imports ``tree``."""
    done = subprocess.run(
        [sys.executable, __file__, "--walk", which, "--tree", str(tree)],
        env=os.environ | {"PYTHONPATH": str(tree / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
