"""Ranks as processes, each on a device: tensors by the device's own backend (NCCL), everything else by the host's.

The device's backend carries tensors whose form the receiver must know before they come; it matches them by order and
takes no tags. So the first step of a program goes through main memory by the transport that describes its messages,
and both ends write down what each message looked like. From the second step on the tensors go from device to device:

    post    memory for the tensors of the message, and their receives
    send    a snapshot, which the sender's compute stream takes; a message of another form is refused in words
    take    the compute stream waits, not the host

Each neighbour has a communicator for what it gets and one for what it gives, so that neither direction waits for the
other. What is not plain (numbers of the host, tensors with gaps) keeps going through main memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from vpipe.errors import UserError
from vpipe.runtime.device import is_host
from vpipe.runtime.transport.distributed import DistributedTransport
from vpipe.runtime.transport.wire import Envelope, Structure, flatten, unflatten

Pair = tuple[int, int]
"""(rank that sends, rank that receives)."""
Place = tuple[int, int, int, int]
"""(source stage, target stage, microbatch, backward) of a message."""


class Form(NamedTuple):
    """What a message looks like; ``travels`` says whether by the device's backend."""

    structure: Structure
    tensors: tuple[tuple[torch.dtype, tuple[int, ...], bool], ...]
    travels: bool

    def __str__(self) -> str:
        return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape, _ in self.tensors)


def form_of(value: Any, backward: int) -> Form:
    """The form of a message, the same at both ends. An activation that brings its unit's share brings a number of the
    host; strides other than a tensor's own must be described."""
    tensors: list[Tensor] = []
    structure = flatten(value, tensors)
    plain = all(tensor.is_contiguous() and tensor.numel() for tensor in tensors)
    shared = not backward and value[0] is not None
    facts = tuple((tensor.dtype, tuple(tensor.shape), tensor.requires_grad) for tensor in tensors)
    return Form(structure, facts, bool(tensors) and plain and not shared)


class DeviceTransport:
    """One process's end. ``host`` carries what does not go from device to device; ``pairs`` are all ranks' neighbours,
    the same list everywhere."""

    def __init__(self, host: DistributedTransport, device: torch.device, pairs: Sequence[Pair], direct: bool) -> None:
        self.host, self.rank, self.num_ranks = host, host.rank, host.num_ranks
        self._device, self._direct = device, direct
        self._backend = dist.get_default_backend_for_device(device) if direct else ""
        made = [(pair, self._group(sorted(pair))) for pair in (pairs if direct else ())]
        self._groups = {pair: group for pair, group in made if self.rank in pair}
        self._connect()
        self._among: dict[tuple[int, ...], Any] = {}
        self._forms: dict[Hashable, dict[Place, Form]] = {}
        self._known: dict[Place, Form] = {}
        self._learns = True
        self._posted: dict[Envelope, tuple[Form, list[Tensor], list[Any]]] = {}
        self._under_way: list[tuple[Any, Tensor]] = []

    def _group(self, ranks: list[int]) -> Any:
        return dist.new_group(ranks, timeout=self.host.patience, backend=self._backend)

    def _connect(self) -> None:
        """Make every communicator now: the first transfer of one makes its host wait for the other, and in a program
        two ranks could wait for each other in two of them."""
        for (source, target), group in self._groups.items():
            nothing = torch.zeros(1, device=self._device)
            if self.rank == source:
                dist.send(nothing, target, group=group)
            else:
                dist.recv(nothing, source, group=group)

    def prepare_groups(self, groups: Sequence[Sequence[int]]) -> None:
        self.host.prepare_groups(groups)
        for ranks in groups if self._direct else ():
            key = tuple(ranks)
            if key not in self._among:
                self._among[key] = self._group(list(key))

    def begin_program(self, program: Hashable) -> None:
        """What follows is a step of this program: its first, in which messages are described, or another."""
        self._learns = not self._direct or program not in self._forms
        self._known = self._forms.setdefault(program, {})

    def begin_step(self, step: int) -> None:
        self.host.begin_step(step)

    def post(self, envelope: Envelope, source_rank: int) -> None:
        form = self._known.get(_place(envelope))
        if self._learns or form is None or not form.travels:
            self.host.post(envelope, source_rank)
            return
        group = self._groups[source_rank, self.rank]
        buffers = [torch.empty(shape, dtype=dtype, device=self._device) for dtype, shape, _ in form.tensors]
        works = [dist.irecv(buffer, source_rank, group=group) for buffer in buffers]
        self._posted[envelope] = (form, buffers, works)

    def take(self, envelope: Envelope) -> Any:
        if envelope not in self._posted:
            value = self.host.take(envelope)
            self._note(envelope, value)
            return tree_map(self._from_host, value) if value is not None else None
        form, buffers, works = self._posted.pop(envelope)
        for work in works:
            work.wait()
        facts = zip(buffers, form.tensors, strict=True)
        tensors = iter([buffer.requires_grad_(needs_grad) for buffer, (_, _, needs_grad) in facts])
        return unflatten(form.structure, tensors.__next__)

    def send(self, envelope: Envelope, target_rank: int, value: Any) -> None:
        form = self._known.get(_place(envelope))
        if self._learns or form is None or not form.travels:
            self._note(envelope, value)
            self.host.send(envelope, target_rank, tree_map(_to_host, value))
            return
        self._check(envelope, form, value)
        tensors: list[Tensor] = []
        flatten(value, tensors)
        self._under_way = [each for each in self._under_way if not each[0].is_completed()]
        for tensor in tensors:
            snapshot = tensor.detach().clone()
            work = dist.isend(snapshot, target_rank, group=self._groups[self.rank, target_rank])
            self._under_way.append((work, snapshot))

    def _note(self, envelope: Envelope, value: Any) -> None:
        if self._learns and envelope.step >= 0:
            self._known[_place(envelope)] = form_of(value, envelope.backward)

    def _check(self, envelope: Envelope, form: Form, value: Any) -> None:
        found = form_of(value, envelope.backward)
        if found != form:
            raise UserError(
                f"the {envelope} are {found}, but {form} in the program's first step; messages between devices keep "
                "their form: give batches of one shape, or send through main memory by parallel.backend: gloo "
                "(Pipeline(device_messages=False))"
            )

    def _from_host(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (not leaf.dim() and leaf.dtype is torch.float64):
            return leaf  # a unit's share stays a number of the host
        return leaf.detach().to(self._device).requires_grad_(leaf.requires_grad)

    def end_step(self) -> None:
        self.host.end_step()

    def all_gather(self, value: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> list[Tensor]:
        if is_host(value.device):
            return self.host.all_gather(value, ranks, sizes)
        group = self._among.get(tuple(ranks))
        if group is None or sizes is None or len(set(sizes)) > 1:
            return [block.to(self._device) for block in self.host.all_gather(value.cpu(), ranks, sizes)]
        flat = value.detach().contiguous().view(-1)
        blocks = [torch.empty_like(flat) for _ in ranks]
        dist.all_gather(blocks, flat, group=group)
        return blocks

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
        self.host.fail(error)

    def close(self) -> None:
        self._under_way.clear()
        self.host.close()


def _place(envelope: Envelope) -> Place:
    return envelope[1], envelope[2], envelope[3], envelope[4]


def _to_host(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or is_host(leaf.device):
        return leaf
    return leaf.detach().cpu().requires_grad_(leaf.requires_grad)
