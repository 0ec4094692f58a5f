"""What becomes of freed memory, by the page faults of a process that takes and frees the same again and again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from torch import nn
from vpipe import Pipeline

torch.set_num_threads(1)
layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
pipe = Pipeline(layers, nn.functional.mse_loss, schedule="gpipe", num_microbatches=8, swap=float(sys.argv[1]),
                optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
x = torch.randn(8 * 6000, 64)
counts = []
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pipe.train_step(x, x)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(counts))
"""


def faults_of_a_step(swap: float) -> int:
    """The fewest of any of five steps: the first ones still look for memory."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(swap)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked")
@pytest.mark.timeout(180)
def test_memory_stays_for_the_next_step_unless_it_is_swapped() -> None:
    kept, returned = faults_of_a_step(0.0), faults_of_a_step(1.0)
    assert kept < 1000, f"a step took {kept} page faults"
    assert returned > 10_000, f"a step that swaps took {returned} page faults"
