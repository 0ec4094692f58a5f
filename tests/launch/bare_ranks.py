"""Ranks as srun starts them, which no launcher looks after; torch is imported once for all tests, then forked.

Reads one JSON object a line: ``{"num_ranks": 3, "folder": F, "words": [SCRIPT, …], "environment": {…}}``. Answers with
the process group of the ranks, and with their exit codes when all have ended. What the ranks say goes to
FOLDER/all.txt, in the order of its arrival.
"""

import gc
import json
import os
import runpy
import sys

import torch._dynamo  # noqa: F401 - an optimizer would import it in its first step

import vpipe.train.worker  # noqa: F401


def be_rank(rank: int, order: dict) -> None:
    os.environ.update(order["environment"], RANK=str(rank), WORLD_SIZE=str(order["num_ranks"]))
    streams = os.open(os.path.join(order["folder"], "all.txt"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(streams, 1)
    os.dup2(streams, 2)
    sys.argv = order["words"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def answer(**values: object) -> None:
    print(json.dumps(values), flush=True)


gc.freeze()
while line := sys.stdin.readline():
    order = json.loads(line)
    leader = 0
    ranks = {}
    for rank in range(order["num_ranks"]):
        pid = os.fork()
        if pid == 0:
            be_rank(rank, order)
            sys.exit(0)
        os.setpgid(pid, leader)
        leader = leader or pid
        ranks[pid] = rank
    answer(group=leader)
    codes = {}
    while ranks:
        pid, status = os.wait()
        codes[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
    answer(codes=[codes[rank] for rank in sorted(codes)])
