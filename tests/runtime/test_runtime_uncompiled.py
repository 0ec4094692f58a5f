"""Runs do without the compiler where nobody has loaded it: same bits, and torch is as it was afterwards.

Every case runs in an interpreter of its own: in this one the compiler may be loaded already.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMON = """
import sys, torch
from vpipe.runtime.updates import optimizing
from vpipe.runtime.updates.optimizing import COMPILER, REMEMBERED, uncompiled as around

def asleep():
    kept = [f for f in vars(torch.optim.Optimizer).values() if hasattr(getattr(f, "__wrapped__", None), REMEMBERED)]
    return COMPILER not in sys.modules and "_dynamo" not in vars(torch) and not kept
"""

EVERY = """
def trained(kind, options, plainly):
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(5))
    if plainly:
        made = kind([weight], lr=0.1, **options)
    else:
        with around(kind):
            made = kind([weight], lr=0.1, **options)
    for _ in range(3):
        weight.grad = torch.randn(5)
        made.step() if plainly else optimizing.step(made)
        made.zero_grad(set_to_none=True) if plainly else optimizing.clear(made)
        assert weight.grad is None
        assert torch.is_grad_enabled()
    return weight.detach()

kinds = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam]
cases = [(kind, options) for kind in kinds for options in ({}, {"foreach": True})]
found = [trained(*case, plainly=False) for case in cases]
assert asleep()
expected = [trained(*case, plainly=True) for case in cases]
assert not asleep(), "plain torch loads the compiler: this is what is saved"
assert all(torch.equal(a, b) for a, b in zip(found, expected))
assert not torch.equal(found[0], found[2])
"""

AWAKE = """
weight = torch.nn.Parameter(torch.ones(2))
with around(torch.optim.SGD):
    made = torch.optim.SGD([weight], lr=0.1)
    inside = sys.modules[COMPILER]
    assert "torch._dynamo" == inside.__name__ and inside.graph_break() is None
    real = inside.config                      # a name that the stand-in does not have
assert sys.modules[COMPILER] is torch._dynamo and torch._dynamo is not inside and real is torch._dynamo.config
assert not hasattr(torch.optim.Optimizer.add_param_group.__wrapped__, REMEMBERED)
before = dict(sys.modules)
optimizing.step(made)
assert sys.modules[COMPILER] is before[COMPILER]

@torch.compile(backend="eager")
def compiled(x):
    return x * 2
assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
"""

OWN = """
class Own(torch.optim.SGD):
    def step(self):
        assert COMPILER not in sys.modules or isinstance(sys.modules[COMPILER].__path__, object), "no stand-in"
        super().step()
made = Own([torch.nn.Parameter(torch.ones(2))], lr=0.1)
optimizing.step(made)
assert not asleep(), "code of a user's own sees torch as it is"
"""

RUN = f"""
sys.path.insert(0, {str(Path(__file__).parents[1] / "train")!r})
from pathlib import Path
from tempfile import TemporaryDirectory
import train_runs
with TemporaryDirectory() as folder:
    alone = {{"parallel.model_parallel_size": 1, "training.max_iterations": 3, "observe.trace": True}}
    train_runs.run(train_runs.tiny(alone), Path(folder))
    assert '"in_step"' in Path(folder, "events", "rank0.steps.jsonl").read_text()
assert asleep(), "a whole run needs no compiler, also where a step's bytes are counted"
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [EVERY, AWAKE, OWN, RUN], ids=["every", "awake", "own", "run"])
def test_in_a_fresh_interpreter(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", COMMON + code], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
