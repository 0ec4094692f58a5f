"""Ranks as processes, each on a device: tensors by the device's own backend (NCCL), everything else by the host's.

The device's backend carries tensors whose form the receiver must know before they come. Forms repeat from step to step,
so they are told once: in the first step of a program with data of this form, every message is described over the host's
transport while its tensors go from device to device; from then on the tensors go alone.

                 first step of these forms                       every other step
    begin        all ranks compare one number each: is the data of the form that they know? (host)
    post         wait for the description (host), then as →      room for the tensors, and their receives
    send         the description (host), then as →               a snapshot, which the compute stream takes
    take         the compute stream waits, not the host          the same

A program between devices is lowered so that each receive may block its rank (``receives_block``): the host may wait
where it posts, and so may a device, which cannot wait for anything as a whole while a receive that is posted spins.
Messages of a form that could not be foreseen (a layer whose output depends on values) are refused in words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from vpipe.errors import UserError
from vpipe.runtime.crossing import unflatten
from vpipe.runtime.device import is_host
from vpipe.runtime.ranks import device_groups
from vpipe.runtime.transport.distributed import DistributedTransport
from vpipe.runtime.transport.form import Form, form_of, room, seen, snapshot
from vpipe.runtime.transport.routes import CHAIN, Route, route_of
from vpipe.runtime.transport.wire import Envelope

Place = tuple[int, int, int, int]
"""(source stage, target stage, microbatch, backward) of a message."""
MOST_FORMS = 64
"""Programs and forms of their data that are remembered."""


class Coming(NamedTuple):
    """A message whose tensors are on their way."""

    form: Form
    memory: list[Tensor]
    works: list[Any]
    numbers: tuple[Tensor, ...] | None
    """The tensors on the host, where they have come with the description."""


class DeviceTransport:
    """One process's end. ``host`` carries what does not go from device to device; where not ``direct``, everything."""

    def __init__(self, host: DistributedTransport, device: torch.device, direct: bool) -> None:
        self.host, self.rank, self.num_ranks = host, host.rank, host.num_ranks
        self._device, self._direct = device, direct
        self._backend = dist.get_default_backend_for_device(device) if direct else ""
        self._made: set[Route] = set()
        self._groups: dict[Route, Any] = {}
        self._among: dict[tuple[int, ...], Any] = {}
        self._forms: dict[Hashable, dict[Place, Form]] = {}
        self._known: dict[Place, Form] = {}
        self._learns = self._whole = True
        self._coming: dict[Envelope, Coming] = {}
        self._under_way: dict[Route, list[tuple[list[Any], list[Tensor]]]] = defaultdict(list)
        """Of each route what leaves, as long as it may be read."""

    def _group(self, ranks: list[int]) -> Any:
        """A communicator, connected now: bound to a device, torch does not leave that to the first message. (Where
        ranks outlive their groups, it does: from outside only a group that is made can be ended.)"""
        told: dict[str, Any] = {"timeout": self.host.patience, "backend": self._backend}
        if not device_groups.are_outlived():
            told["device_id"] = self._device
        if self._backend == "nccl":  # its streams come from a pool of their own, and are not behind the compute stream
            told["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            told["pg_options"]._timeout = self.host.patience
        group = dist.new_group(ranks, **told)
        if self.rank in ranks:
            device_groups.remember(group, self._device)
        return group

    def prepare_routes(self, routes: Sequence[Route]) -> None:
        """Make communicators: every rank calls this with the same list of all ranks' routes. Each is used once now: the
        first transfer makes its host wait for the other, and in a program two could wait for each other in two."""
        for route in routes if self._direct else ():
            if route in self._made:
                continue
            self._made.add(route)
            group = self._group(sorted(route[:2]))
            nothing = torch.zeros(1, device=self._device)
            if self.rank == route.source:
                dist.send(nothing, route.target, group=group)
            elif self.rank == route.target:
                dist.recv(nothing, route.source, group=group)
            if self.rank in route[:2]:
                self._groups[route] = group

    def prepare_groups(self, groups: Sequence[Sequence[int]]) -> None:
        self.host.prepare_groups(groups)
        everyone = list(range(self.num_ranks))
        for ranks in [*groups, everyone] if self._direct else ():
            key = tuple(ranks)
            if key not in self._among:
                self._among[key] = self._group(list(key))

    def begin_program(self, program: Hashable, data: Callable[[], Hashable]) -> None:
        """What follows is a step of this program; ``data`` is whatever decides the form of this rank's messages."""
        if not self._direct:
            return
        mine = torch.tensor([crc32(repr(data()).encode())], dtype=torch.int64)
        everyone = range(self.num_ranks)
        key = (program, *[int(part) for part in self.host.all_gather(mine, everyone, [1] * self.num_ranks)])
        self._learns = key not in self._forms
        self._known = self._forms.pop(key, {})
        self._forms[key] = self._known
        if len(self._forms) > MOST_FORMS:
            del self._forms[next(iter(self._forms))]

    def begin_step(self, step: int) -> None:
        if step < 0:  # before the first program: weights that all start with
            self._learns, self._known = True, {}
        self._whole = False
        self.host.begin_step(step)

    def post(self, envelope: Envelope, source_rank: int) -> None:
        route = route_of(envelope, source_rank, self.rank)
        if route not in self._groups:
            self.host.post(envelope, source_rank)
            return
        numbers = None
        if self._learns:
            self.host.post(envelope, source_rank)
            text, there, *values = self.host.take(envelope)
            self._known[_place(envelope)], numbers = Form.understood(text, there), tuple(values)
        form = self._known[_place(envelope)]
        if form.brings_numbers and numbers is None:
            self.host.post(envelope, source_rank)
        self._coming[envelope] = self._receive(form, route, numbers)

    def _receive(self, form: Form, route: Route, numbers: tuple[Tensor, ...] | None) -> Coming:
        memory = [room(fact, self._device) for fact in form.moving]
        return Coming(form, memory, self._transfer(dist.irecv, memory, route, route.source), numbers)

    def _transfer(self, call: Any, memory: Iterable[Tensor], route: Route, peer: int) -> list[Any]:
        """Begin to send or receive a message, tensor by tensor: a batch would go over a communicator of its own, which
        ``prepare_routes`` has not made."""
        return [call(block, peer, group=self._groups[route]) for block in memory if block.numel()]

    def take(self, envelope: Envelope) -> Any:
        if envelope not in self._coming:
            value = self.host.take(envelope)
            return tree_map(self._from_host, value) if value is not None else None
        form, memory, works, numbers = self._coming.pop(envelope)
        if numbers is None:
            numbers = self.host.take(envelope) if form.brings_numbers else ()
        for work in works:
            work.wait()
        here, there = iter(numbers), iter(memory)
        tensors = [
            (seen(next(there), fact) if moves else next(here)).requires_grad_(fact.needs_grad)
            for fact, moves in zip(form.facts, form.there, strict=True)
        ]
        return unflatten(form.structure, tensors)

    def send(self, envelope: Envelope, target_rank: int, value: Any) -> None:
        route = route_of(envelope, self.rank, target_rank)
        if route not in self._groups:
            self.host.send(envelope, target_rank, tree_map(_to_host, value))
            return
        form, tensors = form_of(value)
        numbers = [tensor for tensor, there in zip(tensors, form.there, strict=True) if not there]
        if self._learns:
            self._known[_place(envelope)] = form
            self.host.send(envelope, target_rank, (*form.described(), *numbers))
        else:
            self._check(envelope, form)
            if form.brings_numbers:
                self.host.send(envelope, target_rank, tuple(numbers))
        moving = [tensor for tensor, there in zip(tensors, form.there, strict=True) if there]
        memory = [snapshot(tensor, fact) for tensor, fact in zip(moving, form.moving, strict=True)]
        leaving = self._under_way[route]
        leaving.append((self._transfer(dist.isend, memory, route, target_rank), memory))
        self._let_go(leaving, route.skip == CHAIN)

    def _let_go(self, leaving: list[tuple[list[Any], list[Tensor]]], waits: bool) -> None:
        """Free what left before, for what the compute stream does next: the memory of sends is then that of three of a
        route, however far the host is ahead. That stream hardly waits, and never for what it does later: a receive
        from the neighbouring stage is posted where its message is sent; that of a skip comes later, so it is asked."""
        while len(leaving) > 2 and (waits or all(work.is_completed() for work in leaving[0][0])):
            for work in leaving.pop(0)[0]:
                work.wait()

    def _check(self, envelope: Envelope, found: Form) -> None:
        form = self._known[_place(envelope)]
        if found != form:
            raise UserError(
                f"the {envelope} are {found}, but were {form} with data of the same form; a layer whose output depends "
                "on the values of its input needs parallel.backend: gloo (Pipeline(device_messages=False)), which "
                "sends through main memory"
            )

    def _from_host(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (not leaf.dim() and leaf.dtype is torch.float64):
            return leaf  # a unit's share stays a number of the host
        return leaf.detach().to(self._device).requires_grad_(leaf.requires_grad)

    def end_step(self) -> None:
        self.host.end_step()
        self._whole = True

    def all_gather(self, value: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> list[Tensor]:
        if is_host(value.device):
            return self.host.all_gather(value, ranks, sizes)
        group = self._among.get(tuple(ranks))
        if group is None or sizes is None:
            return [block.to(self._device) for block in self.host.all_gather(value.cpu(), ranks, sizes)]
        mine = torch.zeros(max(sizes), dtype=value.dtype, device=self._device)
        mine[: value.numel()] = value.detach().reshape(-1)
        blocks = [torch.empty_like(mine) for _ in ranks]
        dist.all_gather(blocks, mine, group=group)
        return [block[:size] for block, size in zip(blocks, sizes, strict=True)]

    def all_reduce(self, value: Tensor, ranks: Sequence[int]) -> None:
        group = self._among.get(tuple(ranks))
        if is_host(value.device):
            self.host.all_reduce(value, ranks)
        elif group is not None:
            dist.all_reduce(value, group=group)
        else:
            staged = value.cpu()
            self.host.all_reduce(staged, ranks)
            value.copy_(staged)

    def barrier(self) -> None:
        self.host.barrier()

    def fail(self, error: BaseException) -> None:
        self._forms.clear()  # what a failed step has told is not all
        self.host.fail(error)

    def close(self) -> None:
        """All ranks call this. Communicators take memory of the device, so they go too, if the last step was whole."""
        self._under_way.clear()
        own = [group for ranks, group in self._among.items() if self.rank in ranks]
        if self._whole and dist.is_initialized():
            device_groups.current().part([*self._groups.values(), *own], self._device, self.host.barrier)
        self._groups.clear()
        self._among.clear()
        self._made.clear()
        self.host.close()


def _place(envelope: Envelope) -> Place:
    return envelope[1], envelope[2], envelope[3], envelope[4]


def _to_host(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or is_host(leaf.device):
        return leaf
    return leaf.detach().cpu().requires_grad_(leaf.requires_grad)
