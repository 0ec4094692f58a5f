"""Random moves of layers between ranks, as many as one likes, each compared with the replay to the bit.

python benchmarks/adapt/moves.py --cases 250 --seed 1000        two moves a case
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "runtime"))
from runtime_moves import check_moves, random_moves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=250)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="ten cases")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begin, layers = perf_counter(), 0
    seen: Counter[str] = Counter()
    cases = 10 if arguments.quick else arguments.cases
    for seed in range(arguments.seed, arguments.seed + cases):
        moves = random_moves(seed)
        layers += check_moves(moves)
        seen[moves.case.schedule] += 1
    found = {
        "cases": cases,
        "moves": 2 * cases,
        "layers": layers,
        "schedules": dict(seen),
        "seconds": perf_counter() - begin,
    }
    told = f"{found['moves']} moves of {layers} layers, all equal to the bit ({found['seconds']:.0f} s): {dict(seen)}"
    print(json.dumps(found) if arguments.json else told)


if __name__ == "__main__":
    main()
