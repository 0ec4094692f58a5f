"""What the SLURM tests run on each rank in the place of ``python -m vpipe train``: a small real pipeline.

It is called with vpipe's own words (``-m vpipe train CONFIG --output-dir D [--set K=V] [--resume latest]``), so that
the job script is the one that users get. STEPS, PAUSE and FAIL_RANK in the environment say how it behaves.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from vpipe.launch.environment import adopt
from vpipe.launch.preemption import INTERRUPTED, Preemption


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--output-dir", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--resume")
    args = parser.parse_args(sys.argv[4:])
    preemption = Preemption()
    adopt()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("FAIL_RANK") == str(rank):
        print(f"rank {rank} fails", flush=True)
        return 3
    import torch

    from vpipe import Pipeline

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(size)]
    pipe = Pipeline(
        layers,
        torch.nn.functional.mse_loss,
        schedule="1f1b",
        num_microbatches=4,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    checkpoint = args.output_dir / "checkpoints" / f"{rank}.json"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    step = load(pipe, checkpoint) if args.resume else 0
    names = ("SLURM_NODEID", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")
    told = " ".join(f"{name}={os.environ.get(name)}" for name in names)
    print(f"rank {rank}/{size} starts at step {step} {args.set} {told}", flush=True)
    while step < int(os.environ.get("STEPS", "3")):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 8, generator=generator)
        loss = pipe.train_step(x, x.flip(0))
        step += 1
        wanted = torch.tensor(float(preemption()))
        torch.distributed.all_reduce(wanted)
        if wanted:
            state = {name: value.tolist() for name, value in pipe.state_dict().items()}
            checkpoint.write_text(json.dumps({"step": step, "state": state}))
            torch.distributed.barrier()
            print(f"rank {rank} saved step {step}", flush=True)
            return INTERRUPTED
        time.sleep(float(os.environ.get("PAUSE", "0")))
    if rank == size - 1:
        print(f"done: loss {loss:.9f} after {step} steps", flush=True)
    torch.distributed.barrier()
    return 0


def load(pipe: object, checkpoint: Path) -> int:
    import torch

    saved = json.loads(checkpoint.read_text())
    pipe.load_state_dict({name: torch.tensor(value) for name, value in saved["state"].items()})  # type: ignore[attr-defined]
    return int(saved["step"])


if __name__ == "__main__":
    sys.exit(main())
