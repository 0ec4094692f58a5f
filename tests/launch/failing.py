"""A script of a user's that goes wrong in a chosen way on a chosen rank: ``failing.py HOW RANK [TIMEOUT]``."""

import os
import signal
import subprocess
import sys
import time

import torch
from torch import nn

import vpipe

how, victim = sys.argv[1], int(sys.argv[2])
timeout = float(sys.argv[3]) if len(sys.argv) > 3 else 1800.0
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
is_victim = rank == victim


def now_failing() -> None:
    """Write down when it goes wrong, for the test's clock."""
    with open(os.environ.get("FAILED_AT", os.devnull), "w") as file:
        file.write(str(time.time()))


class Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        raise ArithmeticError("the backward broke")


class Trap(nn.Module):
    """Does its work; in the third step of the victim, goes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if is_victim and self.calls == 10:
            now_failing()
            if how == "forward":
                raise ValueError("the forward broke")
            if how == "backward":
                return Explode.apply(self.work(x))
            if how == "garbage":
                return object()
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
        return self.work(x)


def loss_fn(output, target):
    if how == "loss":
        now_failing()
        raise KeyError("the loss broke")
    return ((output - target) ** 2).mean()


if is_victim and how == "never":
    time.sleep(5)
if is_victim and how == "version":
    vpipe.__version__ = "9.9.9"
torch.manual_seed(0)
pipe = vpipe.Pipeline(
    [Trap() for _ in range(world)],
    loss_fn,
    schedule="gpipe" if is_victim and how == "program" else "1f1b",
    num_microbatches=0 if how == "user" else 4,
    optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
    timeout=timeout,
)
x = torch.randn(8, 4)
for step in range(100_000 if how in ("long", "stubborn") else 4):
    try:
        pipe.train_step(x, x)
    except KeyboardInterrupt:
        if how == "stubborn":
            time.sleep(600)
        raise
    if rank == 0:
        print(f"step {step}", flush=True)
    if is_victim and step == 1:
        now_failing()
        if how == "script":
            raise LookupError("the script broke")
        if how == "exit":
            sys.exit(3)
        if how == "early":
            break
if is_victim and how == "late":
    subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(2)  # and then it still has something to do
