"""Does a pipeline that adapts itself come to the planner's partition, how fast, and what does a move cost?"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

RANKS, MICROBATCHES, SCHEDULE = 4, 8, "1f1b"
UNIT = 0.005
"""Seconds of a layer's forward, input gradient and weight gradient where it costs 1."""
REFERENCE = 4
"""Steps with the planned partition, before and again after: what this machine makes of it."""
SLOW_RANK, SLOW_FROM, SLOW_UNTIL = 1, 8, 26
CASES = {
    "a slow rank that recovers": {"costs": [1.0] * 16, "steps": 40, "slow": True},
    "equal counts at the start": {"costs": [1.0] * 8 + [3.0] * 4 + [1.0] * 4, "steps": 20, "slow": False},
}


def rank(task: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from vpipe import Pipeline
    from vpipe.models.emulated import SleepLayer
    from vpipe.train.adapt import Adapter

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    costs = [cost * UNIT for cost in task["costs"]]
    pipe = Pipeline(
        [lambda cost=cost: SleepLayer(cost, cost, cost) for cost in costs],
        lambda output, target: output.sum() * 0,
        schedule=SCHEDULE,
        num_microbatches=MICROBATCHES,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        partition=[len(costs) // RANKS] * RANKS,
    )
    decisions: list[dict[str, Any]] = []
    step = 0
    adapter = Adapter(
        pipe,
        "on",
        [1.0] * len(costs),
        [1000] * len(costs),
        lambda decision, moved: decisions.append(
            {"step": step, "reason": decision.reason, "seconds": moved.seconds if moved else None}
        ),
    )
    x = torch.zeros(MICROBATCHES, 16)
    seconds, partitions, reference = [], [], []

    def trained(slows: bool) -> float:
        """Seconds of a step; one rank may be slow."""
        slow = 2.0 if slows and pipe.rank == SLOW_RANK else 1.0
        for layer, module in pipe.modules().items():
            assert isinstance(module, SleepLayer)
            module.forward_seconds = module.input_grad_seconds = module.weight_grad_seconds = costs[layer] * slow
        dist.barrier()
        begin = time.perf_counter()
        pipe.train_step(x, x)
        dist.barrier()
        return time.perf_counter() - begin

    pipe.move(pipe.layout.with_counts(task["planned"]))
    reference += [trained(task["slow"]) for _ in range(REFERENCE)]
    pipe.move(pipe.layout.with_counts([len(costs) // RANKS] * RANKS))
    for step in range(task["steps"]):
        partitions.append(pipe.partition)
        seconds.append(trained(task["slow"] and SLOW_FROM <= step < SLOW_UNTIL))
        adapter.after_step(seconds[-1], 1000)
    pipe.move(pipe.layout.with_counts(task["planned"]))
    reference += [trained(task["slow"]) for _ in range(REFERENCE)]
    common.answer(task, {"seconds": seconds, "partitions": partitions, "decisions": decisions, "reference": reference})
    dist.destroy_process_group()


def planned(costs: list[float], slow: bool) -> tuple[list[int], float]:
    """The planner's partition with the true costs, and its bound."""
    from vpipe.plan.costs import LayerCost, Profile
    from vpipe.plan.planner import plan

    layers = tuple(LayerCost(f"layer {i}", c * UNIT, c * UNIT, c * UNIT, 0, 0) for i, c in enumerate(costs))
    speed = [0.5 if slow and rank == SLOW_RANK else 1.0 for rank in range(RANKS)]
    found = plan(
        Profile(layers),
        RANKS,
        num_microbatches=MICROBATCHES,
        schedule=SCHEDULE,
        speed=speed,
        recompute=False,
        swap=False,
    )
    return list(found.layout.counts), found.lower_bound


def measure(name: str) -> dict[str, Any]:
    case = CASES[name]
    wanted, bound = planned(case["costs"], case["slow"])
    answers = common.launch(__file__, RANKS, case | {"planned": wanted})
    seconds, partitions, decisions = (answers[0][key] for key in ("seconds", "partitions", "decisions"))
    reference = statistics.median(answers[0]["reference"])
    begin, end = (SLOW_FROM, SLOW_UNTIL) if case["slow"] else (0, case["steps"])
    bad = statistics.median(seconds[begin + 1 : begin + 3])
    good = statistics.median(seconds[begin + 10 : end])
    moves = [d for d in decisions if d["seconds"] is not None]
    found = {
        "planned": wanted,
        "reached": partitions[end - 1],
        "bound": bound,
        "before": bad,
        "after": good,
        "reference": reference,
        "of the planned partition": reference / good,
        "of the bound": bound / good,
        "last move after": max([d["step"] - begin + 1 for d in moves if begin <= d["step"] < end], default=0),
        "seconds of a move": statistics.median([d["seconds"] for d in moves]) if moves else 0.0,
        "decisions": decisions,
    }
    if case["slow"]:
        found["after recovery"] = partitions[-1]
    return found


def table(result: dict[str, Any]) -> str:
    lines = []
    for name, row in result["rows"].items():
        lines.append(
            f"{name}: planned {row['planned']}, reached {row['reached']} after {row['last move after']} steps; step "
            f"{row['before']:.3f} s → {row['after']:.3f} s; {row['of the planned partition']:.1%} of the speed of the "
            f"planned partition in the same run ({row['reference']:.3f} s), {row['of the bound']:.1%} of the planner's "
            f"bound ({row['bound']:.3f} s); a move takes "
            f"{row['seconds of a move'] * 1e3:.0f} ms"
            + (f"; after the rank has recovered {row['after recovery']}" if "after recovery" in row else "")
        )
        lines += [f"    step {d['step']:2}  {d['reason']}" for d in row["decisions"]]
    return "\n".join(lines)


if __name__ == "__main__":
    arguments = common.options(__doc__ or "", rank)
    names = list(CASES)[:1] if arguments.quick else list(CASES)
    common.finish(arguments, {"question": "adapt", "rows": {name: measure(name) for name in names}}, table)
