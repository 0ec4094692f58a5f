"""What a message costs between two ranks: shared memory, vpipe over gloo, and gloo alone, in turn."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

SIDES = ("shm", "distributed", "gloo alone")
AHEAD = 4
"""Receives that a rank of a pipeline has posted ahead."""
SIZES = {"1 KB": 1024, "64 KB": 64 * 1024, "1 MB": 1024 * 1024}


class GlooAlone:
    """The least that gloo can cost: bytes of a known size in buffers that exist, nothing packed, nothing checked."""

    def __init__(self, num_bytes: int, peer: int) -> None:
        import torch
        import torch.distributed as dist

        self._dist, self._peer = dist, peer
        self._outgoing = torch.zeros(num_bytes, dtype=torch.uint8)
        self._incoming = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(AHEAD)]
        self._sent: list[Any] = []
        self._posted: list[Any] = []

    def begin_step(self, step: int) -> None:
        pass

    def post(self, envelope: Any, source_rank: int) -> None:
        block = self._incoming[envelope.microbatch % AHEAD]
        self._posted.append(self._dist.irecv(block, source_rank, tag=1 + envelope.backward))

    def send(self, envelope: Any, target_rank: int, value: Any) -> None:
        self._sent.append(self._dist.isend(self._outgoing, target_rank, tag=1 + envelope.backward))
        if len(self._sent) > 4:
            self._sent.pop(0).wait()

    def take(self, envelope: Any) -> None:
        self._posted.pop(0).wait()

    def end_step(self) -> None:
        while self._sent:
            self._sent.pop(0).wait()


def rank(task: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from vpipe.runtime import assembly
    from vpipe.runtime.assembly import keep_freed_memory
    from vpipe.runtime.transport.wire import Envelope

    torch.set_num_threads(1)
    keep_freed_memory()  # as every pipeline does
    dist.init_process_group("gloo")
    me, other = dist.get_rank(), 1 - dist.get_rank()
    ours = {name: assembly.between_processes(name, blocking=False, timeout=60) for name in SIDES[:2]}
    step = 0

    def ping_pong(transport: Any, payload: Any, count: int) -> None:
        for k in range(count):
            if me == 0:
                transport.post(Envelope(step, 1, 0, k, 1), other)
                transport.send(Envelope(step, 0, 1, k, 0), other, payload)
                transport.take(Envelope(step, 1, 0, k, 1))
            else:
                transport.post(Envelope(step, 0, 1, k, 0), other)
                transport.send(Envelope(step, 1, 0, k, 1), other, transport.take(Envelope(step, 0, 1, k, 0)))

    def one_way(transport: Any, payload: Any, count: int) -> None:
        for k in range(AHEAD if me else 0):
            transport.post(Envelope(step, 0, 1, k, 0), other)
        for k in range(count):
            if me == 0:
                transport.send(Envelope(step, 0, 1, k, 0), other, payload)
            else:
                transport.take(Envelope(step, 0, 1, k, 0))
                if k + AHEAD < count:
                    transport.post(Envelope(step, 0, 1, k + AHEAD, 0), other)

    found: dict[str, list[list[float]]] = {}
    for size, num_bytes in SIZES.items():
        sides: dict[str, Any] = {**ours, SIDES[2]: GlooAlone(num_bytes, other)}
        payload = {"h": torch.randn(num_bytes // 4)}
        count = task["count"] if num_bytes < 1 << 20 else task["count"] // 4
        for repeat in range(task["repeats"] + 2):
            for name, transport in sides.items():
                for way in (ping_pong, one_way):
                    step += 1
                    dist.barrier()
                    transport.begin_step(step)
                    wall, cpu = time.perf_counter(), time.process_time()
                    way(transport, payload, count)
                    transport.end_step()
                    cpu = time.process_time() - cpu
                    if repeat >= 2:  # the first two grow gloo's buffers and touch the pages of the ring
                        row = found.setdefault(f"{size}/{way.__name__}/{name}", [])
                        row.append([(time.perf_counter() - wall) / count * 1e6, cpu / count * 1e6])
    common.answer(task, found)
    dist.barrier()
    dist.destroy_process_group()


def table(result: dict[str, Any]) -> str:
    lines = ["µs per message (median, quartiles)", f"{'':36}" + "".join(f"{side:>28}" for side in SIDES)]
    for name, row in result["rows"].items():
        cells = [f"{row[side]['median']:.1f} ({row[side]['low']:.1f}–{row[side]['high']:.1f})" for side in SIDES]
        lines.append(f"{name:36}" + "".join(f"{cell:>28}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    arguments = common.options(__doc__ or "", rank)
    task = {"count": 100 if arguments.quick else 400, "repeats": 3 if arguments.quick else 15}
    first, second = common.launch(__file__, 2, task)
    rows: dict[str, Any] = {}
    for size in SIZES:
        for side in SIDES:
            pongs = [first[f"{size}/ping_pong/{side}"], second[f"{size}/ping_pong/{side}"]]
            sent, taken = first[f"{size}/one_way/{side}"], second[f"{size}/one_way/{side}"]
            figures = {
                "latency": [wall / 2 for wall, _ in pongs[0]],
                "cpu, send or take, ping-pong": [cpu / 2 for rank in pongs for _, cpu in rank],
                "cpu, send, one way": [cpu for _, cpu in sent],
                "cpu, take, one way": [cpu for _, cpu in taken],
                "wall, one way": [wall for wall, _ in taken],
            }
            for name, values in figures.items():
                rows.setdefault(f"{size:6} {name}", {})[side] = common.summary(values)
    common.finish(arguments, {"rows": rows}, table)


if __name__ == "__main__":
    main()
