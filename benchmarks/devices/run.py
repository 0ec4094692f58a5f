"""Emulated accelerators whose matrix products take their time: how near is a step to the simulation, and how much of
the communication is exposed when the link gets faster?"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "emulated")]
import common

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")
MICROBATCHES = 16
PRODUCT = 0.020
"""Seconds of one matrix product: a layer's forward, input gradient and weight gradient are one each."""
WIDTH, ROWS = 32, 8
MESSAGE = WIDTH * ROWS * 4
TRANSFER = 0.005
"""Seconds of a message of ``MESSAGE`` bytes: a quarter of a product, hidden behind them where the schedule allows."""
LINKS = (0.020, 0.010, 0.002, 0.0)
"""Seconds of a message, for the second table."""


def devices(seconds: float, product: float) -> Any:
    """The emulated devices, with a link on which a message takes ``seconds``, and slow matrix products."""
    import emulated_device as emulated

    emulated.reset()
    emulated.settings(link_bytes_per_us=MESSAGE / (seconds * 1e6) if seconds else 0)
    for name in ("aten::mm", "aten::addmm"):
        emulated.native.set_cost(name, product * 1e6)
    return emulated


def step(schedule: str, num_ranks: int, transfer: float, repeats: int) -> tuple[list[float], float, float]:
    """Measured steps (from the devices' own times), the simulated step, and the exposed communication per rank."""
    import torch
    from torch import nn

    from vpipe import Pipeline
    from vpipe.observe.bubbles import attribute
    from vpipe.observe.measured import Measured
    from vpipe.rundir.reader import Event
    from vpipe.schedule import catalog
    from vpipe.schedule.simulate import simulate
    from vpipe.schedule.timeline import uniform

    program = catalog.build(schedule, num_ranks, MICROBATCHES)
    devices(transfer, PRODUCT)
    share = program.num_stages / num_ranks
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(program.num_stages)]
    pipe = Pipeline(
        layers, nn.functional.mse_loss, schedule=schedule, num_microbatches=MICROBATCHES, num_ranks=num_ranks,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0), device="emu", skip_nonfinite=False,
    )  # fmt: skip
    x = torch.randn(ROWS * MICROBATCHES, WIDTH)
    found, exposed = [], 0.0
    for repeat in range(repeats + 1):
        begin = time.perf_counter()
        pipe.train_step(x, x)
        if repeat:
            found.append(time.perf_counter() - begin)
    trace = pipe.trace()
    origin = min(records[0].begin for records in trace.records.values())
    ranks = tuple(
        tuple(Event(r.action, r.begin - origin, r.ready - origin, r.end - origin) for r in trace.records[rank])
        for rank in range(num_ranks)
    )
    exposed = attribute(Measured(trace.planned, ranks)).total("communication") / num_ranks / 1e9
    pipe.close()
    each = PRODUCT * share
    costs = uniform(program.placement, forward=each, input_grad=each, weight_grad=each, latency=transfer)
    return found, simulate(program, costs).makespan, exposed


def table(result: dict[str, Any]) -> str:
    lines = [
        f"step over simulated step, {MICROBATCHES} microbatches on emulated devices, "
        f"F = I = W = {PRODUCT * 1e3:.0f} ms a stage, a message {TRANSFER * 1e3:.0f} ms"
    ]
    for name, row in result["rows"].items():
        seconds = row["measured"]
        lines.append(
            f"{name:18} simulated {row['simulated']:.3f} s   measured {seconds['median']:.3f} "
            f"({seconds['low']:.3f}–{seconds['high']:.3f})   ratio {row['ratio']:.3f}"
        )
    lines.append("exposed communication of 1f1b on 4 devices, a rank and step")
    lines += [f"a message {ms:>4} ms   exposed {row:.3f} s" for ms, row in result["exposed"].items()]
    return "\n".join(lines)


def main() -> None:
    arguments = common.options(__doc__ or "")
    import torch

    torch.set_num_threads(1)
    repeats = 1 if arguments.quick else 3
    rows = {}
    for num_ranks in (4, 8):
        for schedule in SCHEDULES:
            measured, expected, _ = step(schedule, num_ranks, TRANSFER, repeats)
            facts = common.summary(measured)
            rows[f"{schedule} p={num_ranks}"] = {
                "simulated": expected,
                "measured": facts,
                "ratio": facts["median"] / expected,
            }
    exposed = {f"{seconds * 1e3:.0f}": step("1f1b", 4, seconds, 1)[2] for seconds in LINKS}
    common.finish(arguments, {"question": "devices", "rows": rows, "exposed": exposed}, table)


if __name__ == "__main__":
    main()
