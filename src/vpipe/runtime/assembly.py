"""Putting a pipeline together: who joins, which transport they take, what they agree on, which weights start equal,
what the process does with memory.

Everything here runs once, before the first step; what depends on the layout is made by ``builder``.

A step frees nearly everything that it took, and the next one takes it again. By default glibc gives most of it back to
the system in between, and every page must then be found and zeroed once more: a GPT stage under gpipe took 8,000 page
faults a step, 2 to 6 % of its time. So freed memory is kept, except where a pipeline swaps: what has gone out must not
stay with the process. Both are choices for the whole process, made by ``mallopt``. Other C libraries have no such
options, and need none or cannot be asked; a device's memory is torch's own affair.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from vpipe.errors import UserError
from vpipe.layer import Layer, TiedWeight
from vpipe.process import under_launcher
from vpipe.runtime.crossing import flatten, unflatten
from vpipe.runtime.device import DEVICES, chosen, is_host
from vpipe.runtime.engine import Engine
from vpipe.runtime.flow import Flow
from vpipe.runtime.options import PipelineOptions
from vpipe.runtime.programs import Programs
from vpipe.runtime.ranks import membership
from vpipe.runtime.ranks.crowding import CrowdedCores
from vpipe.runtime.ranks.meeting import COME_WITHIN, LaunchedRank
from vpipe.runtime.surroundings import use_generator_of
from vpipe.runtime.transport import ondevice
from vpipe.runtime.transport.base import Transport, gather_text
from vpipe.runtime.transport.distributed import DistributedTransport
from vpipe.runtime.transport.inprocess import Hub
from vpipe.runtime.transport.link import Link
from vpipe.runtime.transport.linked import LinkedTransport
from vpipe.runtime.transport.neighbours import Card, Neighbours
from vpipe.runtime.transport.ring_link import RingLink
from vpipe.runtime.transport.stream_link import StreamLink
from vpipe.runtime.transport.wire import Envelope, pack, unpack, unpack_head
from vpipe.runtime.updates.replicas import share_among_replicas
from vpipe.runtime.updates.ties import share_tied
from vpipe.schedule.placement import Layout, Seat

SETUP_STEP = -1
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""The names of the options for ``mallopt``: how much may lie free at the end of the heap, and from which size on a
block is a mapping of its own, which is given back when it is freed. glibc adapts both until one of them is set."""
MOST = 32 * 2**20
"""The largest size that glibc accepts for a block of the heap."""
LARGE = 2**20
"""Blocks from this size on are given back where a pipeline swaps. A GPT stage with tensors of 1 to 4 MiB took a quarter
more processor time at 128 KiB, and half more memory at 2 MiB."""
RING_BYTES = 8 * 1024 * 1024
"""How large a ring grows before its sender waits; it holds at least four of the largest message. So many bytes may be
under way in a stream, too."""
LAUNCHES_WAIT = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING")
"""Variables by which a launched kernel keeps its host from going on."""
TransportName = Literal["auto", "inprocess", "shm", "distributed"]


def join(timeout: float, wanted: int | None = None) -> int:
    """Join the others; how many there are, which must be ``wanted``."""
    world = membership.join(LaunchedRank.read(os.environ) if "WORLD_SIZE" in os.environ else None, timeout)
    if wanted is not None and wanted != world:
        raise UserError(
            f"the pipeline wants {wanted} ranks, but the launcher started {world}; start {wanted} processes"
        )
    return world


@dataclass(frozen=True)
class Wires:
    """This process's ranks, and what joins them to the others."""

    num_ranks: int
    devices: Sequence[torch.device]
    """Of the ranks of this process."""
    seats: tuple[Seat, ...]
    """Of all ranks."""
    hub: Hub | None = None
    """Where all ranks are threads of this process."""
    transports: Sequence[Transport] = ()
    host: DistributedTransport | None = None
    """Where this process is one rank: what carries its messages through main memory."""

    @property
    def in_process(self) -> bool:
        return self.hub is not None


def connect(ranks: PipelineOptions, threads: bool, blocking: bool) -> Wires:
    """Join the others, if a launcher has started any, and open the ways to them. ``threads``: ranks have workers."""
    in_process = not under_launcher()
    world = (ranks.num_ranks or 1) if in_process else join(ranks.timeout, ranks.num_ranks)
    devices = devices_here(ranks.device, world, in_process, threads)
    transport = allowed_transport(ranks.transport, in_process, world, threads=threads)
    if in_process:
        hub = Hub(world, blocking)
        seats = tuple(Seat(socket.gethostname(), str(device)) for device in devices)
        return Wires(world, devices, seats, hub, _ends(hub, devices))
    host = between_processes(transport, blocking=blocking, timeout=ranks.timeout, threads=threads)
    mine = json.dumps([socket.gethostname(), str(devices[0])])
    seats = tuple(Seat(*json.loads(text)) for text in gather_text(host, mine))
    return Wires(world, devices, seats, host=host)


def _ends(hub: Hub, devices: Sequence[torch.device]) -> Sequence[Transport]:
    """All ranks' ends of a hub: on the host, or each on its device."""
    return hub.transports() if all(map(is_host, devices)) else ondevice.transports(hub, devices)


def allowed_transport(wanted: str, in_process: bool, num_ranks: int, threads: bool = False) -> str:
    """Refuse a transport that these ranks cannot have. Of several ``threads``, only gloo serves more than one."""
    if wanted not in get_args(TransportName):
        raise UserError(f"there is no transport {wanted!r}; give one of {', '.join(get_args(TransportName))}")
    if wanted == "inprocess" and not in_process:
        raise UserError(
            f"transport='inprocess' runs all ranks in one process, but a launcher has started {num_ranks}; "
            "give transport='auto', or start the script without a launcher"
        )
    if wanted in ("shm", "distributed") and in_process and num_ranks > 1:
        raise UserError(
            f"transport={wanted!r} needs a process for every rank; start the script with "
            f"'vpipe run --nproc {num_ranks}', or give transport='auto'"
        )
    if threads and wanted == "shm":
        raise UserError(
            "transport='shm' serves one thread of a rank, but the threaded executor has one per microbatch; "
            "give transport='distributed' or 'auto', or executor='plain'"
        )
    return "distributed" if threads and wanted == "auto" and not in_process else wanted


def between_processes(
    wanted: str, *, blocking: bool, timeout: float, threads: bool = False, ring_bytes: int = RING_BYTES
) -> DistributedTransport:
    """The transport of this process, one of several. Every rank calls this at the same time. Where sends wait
    (``blocking``), and where several ``threads`` of a rank send, messages go over gloo."""
    plain = DistributedTransport(blocking=blocking, timeout=timeout)
    if dist.get_world_size() == 1:
        return plain
    door = Neighbours(wanted)
    try:
        door.open(plain.num_ranks)
        cards = [Card(*json.loads(text)) for text in gather_text(plain, json.dumps(door.card))]
        shares = _shares(cards)
        if blocking or threads:
            return plain
        near = door.of_this_machine(plain.rank, cards, min(timeout, COME_WITHIN)) if shares else {}
        far = [rank for rank in range(plain.num_ranks) if rank != plain.rank and rank not in near]
        streams: Mapping[int, Sequence[socket.socket]] = {}
        if not shares or len({card.machine for card in cards}) > 1:  # the same answer on every rank
            streams = door.of_others(plain, cards, far)
    finally:
        door.close()
    links: dict[int, Link] = {peer: RingLink(peer, connection, ring_bytes) for peer, connection in near.items()}
    for peer, (records, tensors) in streams.items():
        streamed = min(cards[rank].streamed for rank in (plain.rank, peer))  # both ends must decide alike
        links[peer] = StreamLink(peer, records, tensors, ring_bytes, plain.patience.total_seconds(), streamed)
    here = cards[plain.rank].machine
    cores = CrowdedCores(sum(card.machine == here for card in cards))
    return LinkedTransport(links, cores, timeout=timeout) if links else plain


def _shares(cards: list[Card]) -> bool:
    """Whether messages go through shared memory: where it is asked for, else where all ranks are on one machine."""
    for rank, card in enumerate(cards):
        if card.wanted != cards[0].wanted:
            raise UserError(
                f"rank {rank} has transport={card.wanted!r}, but rank 0 has {cards[0].wanted!r}; give all the same"
            )
    machines = {card.machine for card in cards}
    if cards[0].wanted == "shm":
        if machines == {""}:
            raise UserError("transport='shm' needs Linux; give transport='auto'")
        return True
    return cards[0].wanted == "auto" and len(machines) == 1 and machines != {""}


def told_by_leader(transport: Transport | None, value: Any) -> Any:
    """Rank 0's value, on every rank: any tuple, list or dict of tensors, numbers and strings. Its bytes are added to
    the others' zeros: a sum is what all transports have. ``None``: there is one process."""
    if transport is None:
        return value
    everyone, envelope = range(transport.num_ranks), Envelope(SETUP_STEP, 0, 0, 0, 0)
    packed = pack(envelope, value if transport.rank == 0 else None)
    sizes = transport.all_gather(torch.tensor([packed.layout.num_bytes]), everyone, [1] * len(everyone))
    block = torch.zeros(int(sizes[0]), dtype=torch.uint8)
    if transport.rank == 0:
        packed.write(block.data_ptr())
    transport.all_reduce(block, everyone)
    return unpack(block, unpack_head(block, envelope))


def devices_here(wanted: str, world: int, in_process: bool, threads: bool) -> list[torch.device]:
    """The devices of this process's ranks; a launcher tells a rank of several which one of its machine it is."""
    told = os.environ.get(DEVICES)
    listed = [int(index) for index in told.split(",")] if told else None
    if in_process:
        found = chosen(wanted, world, listed=listed)
    else:
        local = int(os.environ["LOCAL_RANK"] if "LOCAL_RANK" in os.environ else dist.get_rank())
        found = chosen(wanted, world, local, listed)
    if threads and not all(map(is_host, found)):
        raise UserError(
            f"worker threads run on the CPU, but the device is {found[0]}; give executor='plain', or device='cpu'"
        )
    for device in found:
        use_generator_of(device)
    return found


def agree(programs: Programs, seed: int) -> None:
    """Before anything is built: every rank must be about to run the same program."""
    member = membership.current()
    if member is None:
        return
    spec, flow = programs.spec, programs.flow
    text = repr((spec.program.rows, flow.bounds, flow.skips(), programs.synchronous))
    member.agree(
        {
            "schedule": spec.schedule if isinstance(spec.schedule, str) else "of its own",
            "num_microbatches": str(spec.num_microbatches),
            "partition": str(list(flow.layout.counts)),
            "replicas": str(spec.replicas),
            "seed": str(seed),
            "program": hashlib.sha256(text.encode()).hexdigest()[:12],
        }
    )


def check_launches(flow: Flow) -> None:
    """Refuse a device whose sends wait for their receives, where a value skips stages: it is received much later."""
    homes = [flow.layout.ranks_of(begin) for begin, _ in flow.bounds]
    apart = [(source, target) for source, target in sorted(flow.skips()) if homes[source] != homes[target]]
    waiting = [name for name in LAUNCHES_WAIT if os.environ.get(name) == "1"]
    if waiting and apart:
        raise UserError(
            f"{waiting[0]}=1 makes a rank wait until what it sends is received, and stage {apart[0][1]} receives what "
            f"stage {apart[0][0]} sends past others only when it needs it: the ranks would wait for ever; unset "
            f"{waiting[0]}, or send through main memory (parallel.backend: gloo, Pipeline(device_messages=False))"
        )


def thread_safe(layers: Sequence[Layer]) -> bool:
    """Whether the layers say that ranks of one process may run them at the same time (they draw no random numbers)."""
    return all(getattr(layer.module, "vpipe_thread_safe", False) for layer in layers)


def groups(tied: Sequence[TiedWeight], layout: Layout) -> list[Sequence[int]]:
    """The sets of ranks that exchange something among themselves."""
    owners = [layout.ranks_of_all(layer for layer, _ in tie.owners) for tie in tied]
    return [*layout.circles(), *(ranks for ranks in owners if len(ranks) > 1)]


def share_initial_weights(engine: Engine, tied: Sequence[TiedWeight]) -> None:
    """Replica 0 of a stage, and the first owner of a tied weight, give what they have to the others."""
    engine.transport.begin_step(SETUP_STEP)
    share_among_replicas(engine.stages, engine.flow.layout, engine.transport, SETUP_STEP, weights=True)
    for number, tie in enumerate(tied):
        share_tied(engine, tie, number, SETUP_STEP)
    engine.transport.end_step()


def joined(outputs: Sequence[Any]) -> Any:
    """Units' outputs as one batch."""
    lists: list[list[Tensor]] = []
    structure = None
    for output in outputs:
        tensors: list[Tensor] = []
        structure = flatten(output, tensors)
        lists.append(tensors)
    columns = [torch.cat(column) if column[0].dim() else torch.stack(column) for column in zip(*lists, strict=True)]
    assert structure is not None
    return unflatten(structure, columns)


def keep_freed_memory() -> None:
    """What is freed stays with the process, for the next step."""
    _set(MMAP_THRESHOLD, MOST)
    _set(TRIM_THRESHOLD, 2**30)


def return_freed_memory() -> None:
    """Large blocks go back to the system when they are freed."""
    _set(MMAP_THRESHOLD, LARGE)
    _set(TRIM_THRESHOLD, LARGE)


def _set(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
