"""Ranks as srun starts them: ``bare_ranks.py NUM_RANKS PORT FOLDER SCRIPT ARGS…``; no launcher looks after them.

torch is imported once and the ranks are forked, to spare time. Writes one JSON object: the exit codes, and how many
seconds after the first end the last one came. What the ranks say goes to FOLDER/all.txt, in the order of its arrival.
"""

import gc
import json
import os
import runpy
import sys
import time

import torch._dynamo  # noqa: F401 - an optimizer would import it in its first step

import vpipe.runtime.pipeline  # noqa: F401

num_ranks, port, folder, *target = sys.argv[1:]
streams = os.open(os.path.join(folder, "all.txt"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
ranks = {}
gc.freeze()
for rank in range(int(num_ranks)):
    pid = os.fork()
    if pid == 0:
        os.environ.update(RANK=str(rank), WORLD_SIZE=num_ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        os.dup2(streams, 1)
        os.dup2(streams, 2)
        sys.argv = target
        runpy.run_path(target[0], run_name="__main__")
        sys.exit(0)
    ranks[pid] = rank
with open(os.path.join(folder, "pids.txt"), "w") as file:
    file.write(" ".join(map(str, ranks)))
codes, times = {}, []
while ranks:
    pid, status = os.wait()
    codes[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
    times.append(time.monotonic())
print(json.dumps({"codes": [codes[rank] for rank in sorted(codes)], "spread": times[-1] - times[0]}))
