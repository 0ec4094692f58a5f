"""What some SLURM tests run on each rank in the place of ``python -m vpipe train``: it starts in a moment and obeys.

It is called with vpipe's own words (``-m vpipe train CONFIG --output-dir D [--set K=V] [--resume latest]``), so that
the job script is the one that users get. WAIT and FAIL_RANK in the environment say how it behaves.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from vpipe.launch.environment import adopt

TOLD = ("SLURM_NODEID", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--output-dir", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--resume")
    args = parser.parse_args(sys.argv[4:])
    adopt()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args.output_dir.mkdir(parents=True, exist_ok=True)
    told = " ".join(f"{name}={os.environ.get(name)}" for name in TOLD)
    told += f" secret={len(os.environ.get('VPIPE_SECRET', ''))}"
    print(f"rank {rank}/{size} resume {args.resume} {args.set} {told}", flush=True)
    if "TELL" in os.environ:
        print(Path(os.environ["TELL"]).read_text(), flush=True)
    if os.environ.get("FAIL_RANK") == str(rank):
        print(f"rank {rank} fails", flush=True)
        return 3
    time.sleep(float(os.environ.get("WAIT", "0")))
    print(f"rank {rank} done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
