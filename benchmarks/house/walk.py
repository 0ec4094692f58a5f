"""How much code runs where one command runs: the functions of src/vpipe that are entered, and their lines.

    python benchmarks/house/walk.py               code lines of the house, and the walks of train, plan and Pipeline
    python benchmarks/house/walk.py --tree PATH   the same for another checkout (its src/ is used)
    python benchmarks/house/walk.py --functions   with the functions of each walk, the longest first

Joining files cannot improve these figures, only less code on the way can. A walk is taken by a command as a user types
it: one batch of ``vpipe train`` on two ranks as threads, ``vpipe plan`` of a chain of 16 layers, one step of a
``Pipeline`` of plain layers. Every process and thread of the command counts, each function once. Lines of code are
counted as tests/test_house.py counts them.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from house_lines import code_lines

RECORDER = """
import os, sys, threading
OUT, ROOT = os.environ["WALK_OUT"], os.environ["WALK_ROOT"]
seen, state = set(), {"pid": 0, "file": None}
def entered(frame, event, arg):
    code = frame.f_code
    if event != "call" or not code.co_flags & 1 or not code.co_filename.startswith(ROOT):
        return
    if os.getpid() != state["pid"]:
        state["pid"], state["file"] = os.getpid(), open(f"{OUT}/{os.getpid()}.txt", "a", buffering=1)
        seen.clear()
    key = code.co_filename, code.co_qualname
    if key not in seen:
        seen.add(key)
        state["file"].write(f"{code.co_filename[len(ROOT):]}\\t{code.co_qualname}\\t{code.co_firstlineno}\\n")
sys.setprofile(entered); threading.setprofile(entered)
os.register_at_fork(after_in_child=lambda: (sys.setprofile(entered), threading.setprofile(entered)))
"""
CONFIG = """model: {name: gpt, hidden_size: 16, num_layers: 4, num_heads: 2, sequence_length: 8}
dataset: {name: synthetic, batch_size: 8, extra: {vocab_size: 32, num_examples: 32}}
training: {num_microbatches: 4, max_iterations: 1, evaluation_interval: -1}
parallel: {model_parallel_size: 2, scheduler: 1f1b, transport: inprocess}
checkpoint: {interval: -1}
observe: {trace: false}
launch: {threads: 1}
"""
LAYER = "{} -- X() -- forward_compute_time=1, backward_compute_time=2, activation_size=10.0, parameter_size=4\n"
CHAIN = "".join(map(LAYER.format, range(16))) + "".join(f"\t{n} -- {n + 1}\n" for n in range(15))
SCRIPT = """
import torch
from torch import nn
from vpipe import Pipeline
pipe = Pipeline([nn.Linear(4, 4) for _ in range(4)], nn.functional.mse_loss, num_ranks=2, num_microbatches=4,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
pipe.train_step(torch.randn(8, 4), torch.randn(8, 4))
"""
WALKS = {
    "train": ["-m", "vpipe", "train", "config.yaml", "--output-dir", "run"],
    "plan": ["-m", "vpipe", "plan", "graph.txt", "-p", "4", "-m", "8"],
    "pipeline": ["script.py"],
}

Entered = dict[tuple[str, str], int]
"""(file, function) → its lines."""


def walk(words: list[str], house: Path) -> Entered:
    """The functions that the command enters."""
    with tempfile.TemporaryDirectory() as folder:
        place, out, site = (Path(folder, name) for name in ("", "out", "site"))
        out.mkdir()
        site.mkdir()
        files = {"config.yaml": CONFIG, "graph.txt": CHAIN, "script.py": SCRIPT, "site/sitecustomize.py": RECORDER}
        for name, text in files.items():
            (place / name).write_text(text)
        path = os.pathsep.join([str(site), str(house.parent)])
        told = {"PYTHONPATH": path, "WALK_OUT": str(out), "WALK_ROOT": f"{house}{os.sep}"}
        subprocess.run(
            [sys.executable, *words], cwd=place, env=os.environ | told, timeout=300, capture_output=True, check=True
        )
        keys = {tuple(line.split("\t")) for file in out.iterdir() for line in file.read_text().splitlines()}
    spans = {file: lengths(house / file) for file in {key[0] for key in keys}}
    return {(file, name): spans[file].get(int(first), 0) for file, name, first in keys}


def lengths(path: Path) -> dict[int, int]:
    """First line of each function, decorators included → its lines."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found[first] = (node.end_lineno or first) - first + 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2], help="The checkout.")
    parser.add_argument("--functions", action="store_true", help="Name the functions of each walk.")
    given = parser.parse_args()
    house = given.tree.resolve() / "src" / "vpipe"
    print(f"{'code lines':>12}  {sum(code_lines(path.read_text()) for path in house.rglob('*.py'))}")
    for name, words in WALKS.items():
        found = walk(words, house)
        files = len({file for file, _ in found})
        print(f"{name:>12}  {len(found)} functions of {sum(found.values())} lines, in {files} files")
        for (file, function), lines in sorted(found.items(), key=lambda each: -each[1]) if given.functions else ():
            print(f"{lines:>20}  {file}: {function}")


if __name__ == "__main__":
    main()
