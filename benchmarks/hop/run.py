"""Where the microseconds of a hop go: what our own trace says of sleeping layers under 1f1b, through shared memory and
over gloo, in turn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

TRANSPORTS = {"shm": "auto", "gloo": "distributed"}
MICROBATCHES, NUMBERS = 16, 64 * 1024
SECONDS = 0.004
"""Of F, of I and of W; a message has 256 KB."""
SLEPT = {"F": SECONDS, "B": 2 * SECONDS}
Records = dict[tuple[str, int, int], tuple[int, int, int]]
"""(kind, stage, microbatch) → nanoseconds of its begin, of having what it needs, and of its end."""


def rank(task: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from vpipe import Pipeline
    from vpipe.models.emulated import SleepLayer

    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def pipeline(transport: str) -> Pipeline:
        return Pipeline(
            [SleepLayer(SECONDS, SECONDS, SECONDS) for _ in range(dist.get_world_size())],
            lambda output, target: output.sum() * 0,
            schedule="1f1b",
            num_microbatches=MICROBATCHES,
            optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0),
            transport=transport,
        )

    x = torch.zeros(MICROBATCHES, NUMBERS)
    pipes = {name: pipeline(transport) for name, transport in TRANSPORTS.items()}
    found: dict[str, list[Any]] = {name: [] for name in pipes}
    for repeat in range(task["repeats"] + 2):
        for name, pipe in pipes.items():
            dist.barrier()
            pipe.train_step(x, x)
            if repeat >= 2:
                records = [record for row in pipe.trace().records.values() for record in row]
                found[name].append(
                    [[*map(str, r.action[1:2]), *r.action[::2], r.begin, r.ready, r.end] for r in records]
                )
    common.answer(task, found)
    dist.barrier()
    dist.destroy_process_group()


def parts(records: Records) -> dict[str, list[float]]:
    """Name of a part → its microseconds, every time it occurred. Ranks of one machine share their clock."""
    found: dict[str, list[float]] = {}

    def note(name: str, nanoseconds: float) -> None:
        found.setdefault(name, []).append(nanoseconds / 1e3)

    for (kind, stage, microbatch), (begin, ready, end) in records.items():
        if kind in SLEPT:
            note(f"{kind}: beyond its sleep", end - ready - SLEPT[kind] * 1e9)
            source = records.get((kind, stage - 1 if kind == "F" else stage + 1, microbatch))
            if source is not None and source[2] > begin:
                note(f"{kind}: from the neighbour's end to having the message", ready - source[2])
            elif source is not None:
                note(f"{kind}: to take a message that was there", ready - begin)
        elif kind.startswith(("SEND", "RECV")):
            note({"SEND": "a send", "RECV": "a receive posted"}[kind[:4]], end - begin)
    return found


def table(result: dict[str, Any]) -> str:
    lines = ["µs (median, quartiles) of 1f1b on 4 ranks, F/B 4/8 ms, messages of 256 KB"]
    lines.append(f"{'':56}" + "".join(f"{side:>28}" for side in TRANSPORTS))
    for name, row in result["rows"].items():
        cells = [f"{row[side]['median']:.0f} ({row[side]['low']:.0f}–{row[side]['high']:.0f})" for side in TRANSPORTS]
        lines.append(f"{name:56}" + "".join(f"{cell:>28}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    arguments = common.options(__doc__ or "", rank)
    repeats = 2 if arguments.quick else 8
    ranks = common.launch(__file__, 4, {"repeats": repeats})
    rows: dict[str, dict[str, Any]] = {}
    for side in TRANSPORTS:
        found: dict[str, list[float]] = {}
        for repeat in range(repeats):
            step = [record for each in ranks for record in each[side][repeat]]
            records: Records = {
                (kind, stage, unit): (begin, ready, end) for kind, stage, unit, begin, ready, end in step
            }
            for name, values in parts(records).items():
                found.setdefault(name, []).extend(values)
        for name, values in sorted(found.items()):
            rows.setdefault(name, {})[side] = common.summary(values)
    common.finish(arguments, {"question": "hop", "rows": rows}, table)


if __name__ == "__main__":
    main()
