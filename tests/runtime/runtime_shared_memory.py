"""What ranks do with links alone: rings and windows that are too small, peers that die, nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from runtime_transports import forbidden_pickle

from vpipe.runtime import assembly
from vpipe.runtime.ranks.failure import PeerLost
from vpipe.runtime.transport.linked import LinkedTransport
from vpipe.runtime.transport.ring_link import RingLink
from vpipe.runtime.transport.wire import Envelope


def opened(wanted: str = "shm", timeout: float = 30.0, ring_bytes: int = 1 << 16) -> LinkedTransport:
    transport = assembly.between_processes(wanted, blocking=False, timeout=timeout, ring_bytes=ring_bytes)
    assert isinstance(transport, LinkedTransport)
    return transport


def in_shared_memory(scenario: Callable[..., Any], *arguments: Any) -> Any:
    """The scenario on one rank of a process group."""
    with forbidden_pickle():
        transport = opened()
        try:
            return scenario(transport, *arguments)
        finally:
            transport.close()


def chosen(wanted: str, blocking: bool, threads: bool = False) -> list[str]:
    """The kinds of links to the other ranks."""
    transport = assembly.between_processes(wanted, blocking=blocking, timeout=30, threads=threads)
    transport.close()
    links = transport.links if isinstance(transport, LinkedTransport) else {}
    return [type(link).__name__ for _, link in sorted(links.items())]


def chosen_differently(wanted: list[str]) -> str:
    try:
        assembly.between_processes(wanted[torch.distributed.get_rank()], blocking=False, timeout=30)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def everybody_to_everybody(num_messages: int, length: int, ring_bytes: int, wanted: str = "shm") -> int:
    """All ranks send everything before they take anything: rings are full in all directions at once."""
    transport = opened(wanted, ring_bytes=ring_bytes)
    others = [rank for rank in range(transport.num_ranks) if rank != transport.rank]
    for step in range(2):
        transport.begin_step(step)
        for k in range(num_messages):
            for other in others:
                transport.post(Envelope(step, other, transport.rank, k, 0), other)
                value = torch.full((length + k % 7,), float(transport.rank * 1000 + k))
                transport.send(Envelope(step, transport.rank, other, k, 0), other, value)
        for other in reversed(others):
            for k in range(num_messages):
                found = transport.take(Envelope(step, other, transport.rank, k, 0))
                assert torch.equal(found, torch.full((length + k % 7,), float(other * 1000 + k)))
        transport.end_step()
    largest = max(link.num_bytes if isinstance(link, RingLink) else 0 for link in transport.links.values())
    transport.barrier()
    transport.close()
    return largest


def running_ahead(num_messages: int, wanted: str = "shm") -> int:
    """Rank 0 sends everything before rank 1 takes anything: how many messages rank 1 ever holds beside the one it
    takes."""
    transport = opened(wanted)
    transport.begin_step(0)
    envelopes = [Envelope(0, 0, 1, k, 0) for k in range(num_messages)]
    most = 0
    for k, envelope in enumerate(envelopes):
        if transport.rank == 0:
            transport.send(envelope, 1, torch.full((100,), float(k)))
        else:
            transport.post(envelope, 0)
    transport.barrier()
    for k, envelope in enumerate(envelopes if transport.rank == 1 else ()):
        assert torch.equal(transport.take(envelope), torch.full((100,), float(k)))
        most = max(most, len(transport._mail))
    transport.end_step()
    transport.barrier()
    transport.close()
    return most


def out_of_turn(num_messages: int, wanted: str = "shm") -> list[float]:
    """Rank 1 waits for what rank 0 sends last, after more than a ring holds."""
    transport = opened(wanted, ring_bytes=4096)
    transport.begin_step(0)
    last = Envelope(0, 5, 6, 0, 0)
    envelopes = [*(Envelope(0, 0, 1, k, 0) for k in range(num_messages)), last]
    found: list[float] = []
    if transport.rank == 0:
        for k, envelope in enumerate(envelopes):
            transport.send(envelope, 1, torch.full((300,), float(k)))
    else:
        for envelope in envelopes:
            transport.post(envelope, 0)
        found = [float(transport.take(envelope)[-1]) for envelope in (last, *envelopes[:-1])]
    transport.end_step()
    transport.barrier()
    transport.close()
    return found


def few_numbers(wanted: str = "shm") -> tuple[int, list[list[float]]]:
    """Gathered while a message is under way: how often torch was asked, and what came."""
    transport = opened(wanted, ring_bytes=4096)
    asked = 0
    real = torch.distributed.all_gather

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal asked
        asked += 1
        return real(*arguments, **more)

    torch.distributed.all_gather = counted
    rank, found = transport.rank, []
    try:
        transport.begin_step(3)
        if rank == 0:
            transport.post(Envelope(3, 2, 0, 0, 0), 2)
        if rank == 2:
            transport.send(Envelope(3, 2, 0, 0, 0), 0, torch.zeros(100))
        for number in range(3):
            mine = torch.full((1 + rank,), 10.0 * number + rank, dtype=torch.float64)
            blocks = transport.all_gather(mine, range(3), [1, 2, 3])
            mine.zero_()
            found.append(torch.cat(blocks).tolist())
        kinds = (torch.float32, torch.float64, torch.int64)
        blocks = transport.all_gather(torch.full((1 + rank,), 1 + rank, dtype=kinds[rank]), range(3), [1, 2, 3])
        assert [block.dtype for block in blocks] == list(kinds), "each rank's numbers are of its own kind"
        found.append([float(block.sum()) for block in blocks])
        blocks = transport.all_gather(torch.full((rank,), -0.0), range(3), [0, 1, 2])
        assert [block.signbit().tolist() for block in blocks] == [[], [True], [True] * 2], "bit by bit"
        if rank == 0:
            transport.take(Envelope(3, 2, 0, 0, 0))
        few, asked = asked, 0
        many = transport.all_gather(torch.full((5000,), rank + 1.0), range(3), [5000] * 3)
        found.append([float(block.sum()) for block in many])
        assert transport._latest is not None, "gloo's thread is not the last to let go of it"
        transport.end_step()
        assert transport._latest is None, "what it has gathered can be large"
    finally:
        torch.distributed.all_gather = real
        transport.close()
    assert asked == 1
    return few, found


def away(wanted: str = "shm") -> list[float]:
    """Rank 1 has posted more than the ring holds and waits in a collective that rank 0 enters after its sends."""
    transport = opened(wanted, ring_bytes=4096)
    transport.begin_step(0)
    envelopes = [Envelope(0, 0, 1, k, 0) for k in range(20)]
    if transport.rank == 1:
        for envelope in envelopes:
            transport.post(envelope, 0)
    else:
        for k, envelope in enumerate(envelopes):
            transport.send(envelope, 1, torch.full((200,), float(k)))
    transport.all_reduce(torch.ones(1), [0, 1])
    found = [float(transport.take(envelope)[0]) for envelope in envelopes] if transport.rank == 1 else []
    transport.end_step()
    transport.close()
    return found


def lazily_conjugated(wanted: str = "shm") -> list[Any]:
    """Views whose bytes are not their values."""
    transport = opened(wanted)
    transport.begin_step(0)
    base = torch.tensor([1 + 2j, 3 - 4j])
    envelope = Envelope(0, 0, 1, 0, 0)
    found = []
    if transport.rank == 0:
        transport.send(envelope, 1, (base.conj(), base.conj().imag))
    else:
        transport.post(envelope, 0)
        found = [part.tolist() for part in transport.take(envelope)]
    transport.barrier()
    transport.close()
    return found


def untaken(wanted: str = "shm") -> str:
    """Rank 0 sends on a channel that rank 1 does not know."""
    transport = opened(wanted)
    transport.begin_step(0)
    said = ""
    if transport.rank == 0:
        transport.send(Envelope(0, 5, 6, 0, 0), 1, None)
        transport.send(Envelope(0, 0, 1, 0, 0), 1, None)
    else:
        transport.post(Envelope(0, 0, 1, 0, 0), 0)
        transport.take(Envelope(0, 0, 1, 0, 0))
        try:
            transport.begin_step(1)
        except RuntimeError as error:
            said = str(error)
    transport.barrier()
    transport.close()
    return said


def left_behind(wanted: str = "shm") -> tuple[int, int]:
    """How many descriptors ten more transports leave, and how many mapped segments there are."""
    gc.collect()  # pipelines that earlier tests have left in this process
    num_files = []
    for _ in range(12):
        everybody_to_everybody(5, 20_000, 1 << 16, wanted)
        num_files.append(len(os.listdir("/proc/self/fd")))
    with open("/proc/self/maps") as maps:
        return num_files[-1] - num_files[1], sum("memfd:vpipe" in line for line in maps)


def silent(wanted: str = "shm") -> str:
    """Rank 0 sends nothing: rank 1 says so after the timeout."""
    transport = opened(wanted, timeout=0.5)
    transport._patience = 0.5
    said = ""
    if transport.rank == 1:
        transport.post(Envelope(0, 0, 1, 0, 0), 0)
        try:
            transport.take(Envelope(0, 0, 1, 0, 0))
        except PeerLost as error:
            said = f"{error.peer}: {error}"
    transport.barrier()
    transport.close()
    return said


def killed(sends: bool, with_child: bool, wanted: str = "shm") -> tuple[int | None, str, float]:
    """Rank 0 kills itself while rank 1 waits for it or sends to it. ``with_child``: a worker it forked lives on."""
    transport = opened(wanted)
    transport.begin_step(0)
    if transport.rank == 0:
        if with_child and os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        if sends:
            for k in range(10_000):
                transport.send(Envelope(0, 1, 0, k, 0), 0, torch.ones(100))
        else:
            transport.post(Envelope(0, 0, 1, 0, 0), 0)
            transport.take(Envelope(0, 0, 1, 0, 0))
    except PeerLost as error:
        return error.peer, str(error), time.monotonic() - begin
    return None, "", 0.0


def parted(machines: list[str]) -> tuple[list[str], list[float]]:
    """Ranks that seem to be on different machines exchange messages by streams, the others through shared memory."""
    from vpipe.runtime.transport import neighbours

    own = machines[torch.distributed.get_rank()]
    before, neighbours.machine = neighbours.machine, lambda: own
    try:
        assert chosen("auto", False) == ["StreamLink"] * (len(machines) - 1)
        transport = opened()
    finally:
        neighbours.machine = before
    kinds = [type(link).__name__ for _, link in sorted(transport.links.items())]
    others = [rank for rank in range(transport.num_ranks) if rank != transport.rank]
    transport.begin_step(0)
    for other in others:
        transport.post(Envelope(0, other, transport.rank, 0, 0), other)
    for other in others:
        transport.send(Envelope(0, transport.rank, other, 0, 0), other, torch.tensor(float(transport.rank)))
    found = [float(transport.take(Envelope(0, other, transport.rank, 0, 0))) for other in others]
    transport.end_step()
    transport.close()
    return kinds, found


def without_door(rank: int) -> list[str]:
    """The links where one rank has no address to listen on."""
    from vpipe.runtime.transport import neighbours

    before = neighbours.address_here
    if torch.distributed.get_rank() == rank:
        neighbours.address_here = lambda environ: "203.0.113.1"
    try:
        return chosen("distributed", False)
    finally:
        neighbours.address_here = before


def slow_reader(num_messages: int, length: int) -> list[float]:
    """Rank 0 sends more than the network holds and goes on; rank 1 reads when rank 0 has said that it is done."""
    transport = opened("distributed", ring_bytes=1 << 30)
    link = transport.links[1 - transport.rank]
    envelopes = [Envelope(0, 0, 1, k, 0) for k in range(num_messages)]
    transport.begin_step(0)
    found: list[float] = []
    if transport.rank == 0:
        for k, envelope in enumerate(envelopes):
            value = torch.full((length,), float(k))
            transport.send(envelope, 1, value)
            value.fill_(-1.0)
        assert link._outlet._waiting, "the network took everything: nothing was shown"  # type: ignore[attr-defined]
        torch.distributed.barrier()
    else:
        for envelope in envelopes:
            transport.post(envelope, 0)
        torch.distributed.barrier()
        for envelope in envelopes:
            value = transport.take(envelope)
            assert (value == value[0]).all()
            found.append(float(value[0]))
    transport.end_step()
    assert not link._outlet._waiting  # type: ignore[attr-defined]
    torch.distributed.barrier()
    transport.close()
    return found


def large_ones(rank_of_little_room: int | None) -> list[list[str]]:
    """Per step, how the messages of a channel went that is too large for a stream."""
    from vpipe.runtime.transport import neighbours, stream_link

    granted = neighbours.RECEIVE_BUFFER
    if torch.distributed.get_rank() == rank_of_little_room:
        neighbours.RECEIVE_BUFFER = 64 * 1024
    transport = opened("distributed")
    neighbours.RECEIVE_BUFFER = granted
    limit: int = transport.links[1 - transport.rank]._streamed  # type: ignore[attr-defined]
    if rank_of_little_room is not None:
        assert limit == stream_link.LEAST_STREAMED, "both ends go by the lesser room"
    went: list[list[str]] = []
    for step, length in enumerate((limit // 4, 10, 10)):
        ways: list[str] = []
        transport.begin_step(step)
        for k in range(3):
            envelope = Envelope(step, 0, 1, k, 0)
            if transport.rank == 0:
                before = transport.links[1]._num_sent
                transport.send(envelope, 1, torch.full((length,), float(k)))
                ways.append("stream" if transport.links[1]._num_sent > before else "gloo")
            else:
                transport.post(envelope, 0)
                ways.append("stream" if envelope in transport._expected else "gloo")
                assert torch.equal(transport.take(envelope), torch.full((length,), float(k)))
        transport.end_step()
        went.append(ways)
    transport.barrier()
    transport.close()
    return went
