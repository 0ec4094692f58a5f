"""The backend with NCCL's order: what matches, what hangs, what is named."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from emulated_ranks import on_ranks

pytestmark = pytest.mark.slow


def filled(value: float, size: int = 1000) -> Any:
    import torch

    return torch.full((size,), float(value), device="emu")


def every_collective(rank: int, num_ranks: int) -> dict[str, Any]:
    import emulated_device as emulated
    import torch
    import torch.distributed as dist

    found: dict[str, Any] = {}
    following, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    x, received = filled(rank), filled(-1)
    emulated.native.reset_counts()
    emulated.native.sleep(20000)
    x.add_(100)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, following), dist.P2POp(dist.irecv, received, before)]
    ):
        work.wait()
    doubled = received * 2
    found["host waits"] = emulated.syncs()
    found["batch"] = bool((doubled.cpu() == 2 * (before + 100)).all())
    total = filled(rank + 1)
    dist.all_reduce(total)
    parts = [filled(0, 3) for _ in range(num_ranks)]
    dist.all_gather(parts, filled(rank, 3))
    flat = filled(0, 3 * num_ranks)
    dist.all_gather_into_tensor(flat, filled(rank, 3))
    shard = filled(0, 3)
    dist.reduce_scatter_tensor(shard, torch.arange(3.0 * num_ranks, device="emu"))
    given = filled(rank, 4)
    dist.broadcast(given, 1)
    on_cpu = torch.tensor([float(rank)])
    dist.all_reduce(on_cpu)
    pair = dist.new_group([0, 1])
    inner = filled(1, 2)
    if rank < 2:
        dist.all_reduce(inner, group=pair)
    dist.barrier()
    torch.accelerator.synchronize()
    found["numbers"] = [
        total[0].item(), [p[0].item() for p in parts], flat[::3].tolist(), shard.tolist(), given[0].item(), on_cpu.item(), inner[0].item(),
    ]  # fmt: skip
    return found


def test_transfers_and_collectives() -> None:
    ranks = range(3)
    for rank, found in enumerate(on_ranks(every_collective, 3, 3)):
        assert found["batch"], found
        assert found["host waits"] == {}
        shard = [3.0 * (rank * 3 + i) for i in range(3)]
        everyone = [float(r) for r in ranks]
        assert found["numbers"] == [6.0, everyone, everyone, shard, 1.0, 3.0, 2.0 if rank < 2 else 1.0]


def misuse(rank: int, how: str) -> Any:
    import emulated_device as emulated
    import torch
    import torch.distributed as dist

    a, b = filled(rank), filled(0)
    if how == "both send first":  # unbatched: rendezvous
        hasty = dist.new_group([0, 1], timeout=timedelta(seconds=2), backend="fakenccl")
        dist.isend(a, 1 - rank, group=hasty).wait()
        dist.irecv(b, 1 - rank, group=hasty).wait()
    elif how == "another size":
        hasty = dist.new_group([0, 1], timeout=timedelta(seconds=10), backend="fakenccl")
        if rank == 0:
            dist.isend(a, 1, group=hasty).wait()
        else:
            dist.irecv(filled(0, 999), 0, group=hasty).wait()
    elif how == "tags":
        if rank == 0:
            dist.isend(filled(1), 1, tag=1).wait()
            dist.isend(filled(2), 1, tag=2).wait()
        else:
            dist.irecv(a, 0, tag=2).wait()
            dist.irecv(b, 0, tag=1).wait()
            return [a[0].item(), b[0].item()]
    elif how == "no wait":
        wrong = 0
        for value in range(8):
            if rank == 0:
                emulated.native.sleep(3000)
                dist.isend(filled(value + 1), 1).wait()
            else:
                received = filled(0)
                dist.irecv(received, 0)
                wrong += not bool(((received + 0).cpu() == value + 1).all())
            torch.accelerator.synchronize()
        return wrong
    torch.accelerator.synchronize()
    return "nothing"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("both send first", "timed out after 2000 ms in p2p"),
        ("another size", "order mismatch on communicator p2p0:1: rank 1 expects p2p #0 of 3996 bytes from rank 0, which sent p2p #0 of 4000"),
    ],
)  # fmt: skip
def test_what_hangs_nccl_is_named(how: str, said: str) -> None:
    assert any(said in str(found) for found in on_ranks(misuse, 2, how)), "whoever came first has waited in vain"


def test_order_matches_messages_not_tags() -> None:
    assert on_ranks(misuse, 2, "tags")[1] == [1.0, 2.0]


def test_a_receive_that_nobody_waits_for_is_wrong() -> None:
    assert on_ranks(misuse, 2, "no wait")[1] > 0
