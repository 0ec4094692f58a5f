"""What two ranks may expect of a transport, whatever it is, and the whole suite of it on two accelerators.

One function for each promise, run on both ranks, of this process and of process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from vpipe.runtime.assembly import between_processes
from vpipe.runtime.crossing import copied
from vpipe.runtime.device import HOST, compute_stream, current
from vpipe.runtime.transport.base import Transport
from vpipe.runtime.transport.device import DeviceTransport
from vpipe.runtime.transport.routes import Route, route_of
from vpipe.runtime.transport.wire import Envelope


def exchange(transport: Transport, messages: list[tuple[Envelope, Any]], takes: list[int] | None = None) -> list[Any]:
    """Rank 0 sends, rank 1 posts everything and takes it in the order of ``takes``."""
    found: list[Any] = []
    transport.begin_step(messages[0][0].step)
    if transport.rank == 0:
        for envelope, value in messages:
            transport.send(envelope, 1, value)
    else:
        for envelope, _ in messages:
            transport.post(envelope, 0)
        found = [transport.take(messages[index][0]) for index in takes or range(len(messages))]
    transport.end_step()
    return found


def order(transport: Transport) -> list[Any]:
    return [
        int(value) for value in exchange(transport, [(Envelope(0, 0, 1, k, 0), torch.tensor(k)) for k in range(50)])
    ]


def many_channels(transport: Transport) -> list[Any]:
    """Chain and skips, forward and backward, interleaved; taken channel by channel."""
    channels = [(source, target, backward) for source in (0, 2, 4) for target in (1, 3) for backward in (0, 1)]
    messages = [
        (Envelope(3, s, t, k, b), {"where": (s, t, k, b), "x": torch.full((k + 1,), float(s * 10 + t))})
        for k in range(4)
        for s, t, b in channels
    ]
    by_channel = sorted(range(len(messages)), key=lambda index: (messages[index][0][1:3], messages[index][0][4], index))
    found = exchange(transport, messages, by_channel)
    return [(value["where"], value["x"].tolist()) for value in found]


def sizes(transport: Transport) -> list[Any]:
    """Messages that grow, shrink and grow again, over several steps; large ones are taken out of order."""
    lengths = []
    for step, length in enumerate((10, 300_000, 5, 1_000_000, 0, 70_000)):
        messages = [(Envelope(step, 0, 1, k, 0), (torch.full((length + k,), float(k)), k)) for k in range(3)]
        for tensor, k in exchange(transport, messages, [2, 0, 1]):
            assert (tensor == k).all()
            lengths.append(len(tensor))
    return lengths


def kinds(transport: Transport) -> list[Any]:
    """Every dtype, no dimension, no element, any structure, any strides; numbers keep their type."""
    generator = torch.Generator().manual_seed(0)
    dtypes = [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
    ]
    dtypes += [torch.uint8, torch.bool, torch.complex64, torch.complex128]
    for number, dtype in enumerate(dtypes):
        base = (torch.rand(3, 4, 5, generator=generator) * 50).to(dtype)
        float_like = dtype.is_floating_point or dtype.is_complex
        value = {
            "plain": base.clone().requires_grad_(float_like),
            "scalar": base[0, 0, 0],
            "empty": base[:0],
            "turned": base.permute(2, 0, 1),
            "sliced": base[:, ::2],
            "spread": base[:1].expand(6, 4, 5),
            "numbers": (1, True, 1.0, 0, False, 0.0, -0.0, float("inf"), 2**70, None, "text", "ü"),
            7: [[], (), {}, [base[0]]],
        }
        (found,) = exchange(transport, [(Envelope(number, 0, 1, 0, 0), value)]) or [None]
        if found is not None:
            check_same(found, value)
    return lookalikes(transport, len(dtypes))


def lookalikes(transport: Transport, first_step: int) -> list[Any]:
    """One after the other, tensors that differ from the one before in one thing only."""
    base = torch.arange(16.0).view(4, 4)
    likes = [base, base.clone().requires_grad_(), base, base.t(), base, base.int(), base.view(2, 8), base, base + 1]
    messages = [(Envelope(first_step, 0, 1, k, 0), value) for k, value in enumerate(likes)]
    for found, value in zip(exchange(transport, messages), likes, strict=False):
        check_same(found, value)
    return []


def check_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected), (found, expected)
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert found.requires_grad == expected.requires_grad
        assert found.is_leaf
        assert torch.equal(found.detach(), expected.detach())
        line = 64 // found.element_size()  # kernels ask where numbers lie within a line of memory, and not beyond
        assert found.is_contiguous() == expected.is_contiguous()
        assert [step % line for step in found.stride()] == [step % line for step in expected.stride()]
        assert [step == 0 for step in found.stride()] == [step == 0 for step in expected.stride()]
        assert found.data_ptr() % 64 == (expected.data_ptr() % 64 if found.numel() else 0)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            check_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            check_same(mine, theirs)
    else:
        assert str(found) == str(expected)


def changed_afterwards(transport: Transport) -> list[Any]:
    """What was sent may be changed at once."""
    transport.begin_step(0)
    found = []
    if transport.rank == 0:
        x = torch.zeros(1000)
        for k in range(4):
            x.fill_(k)
            transport.send(Envelope(0, 0, 1, k, 0), 1, x)
        x.fill_(-1)
    else:
        for k in range(4):
            transport.post(Envelope(0, 0, 1, k, 0), 0)
        found = [float(transport.take(Envelope(0, 0, 1, k, 0)).sum()) for k in range(4)]
    transport.end_step()
    return found


def wrong_message(transport: Transport, sent: Envelope, expected: Envelope) -> str:
    """What the receiver says."""
    transport.begin_step(0)
    said = ""
    if transport.rank == 0:
        transport.send(sent, 1, torch.ones(3))
    else:
        try:
            transport.post(expected, 0)
            transport.take(expected)
        except RuntimeError as error:
            said = str(error)
    transport.end_step()
    return said


def collectives(transport: Transport) -> list[Any]:
    mine = torch.arange(2 + transport.rank, dtype=torch.float64)
    unequal = [part.tolist() for part in transport.all_gather(mine, [0, 1])]
    known = [part.tolist() for part in transport.all_gather(mine, [0, 1], [2, 3])]
    total = torch.full((2, 2), 1.0 + transport.rank)
    transport.all_reduce(total, [0, 1])
    transport.barrier()
    return [unequal, known, total.tolist()]


PATIENCE = 60.0
"""Seconds for a message."""


class Expectation(NamedTuple):
    """A scenario, how often (repeated ones have messages of one form, told the first time only), and what rank 1 must
    answer to it."""

    name: str
    scenario: Callable[..., Any]
    arguments: tuple[Any, ...]
    times: int
    kept: Callable[[Any], bool]


_RIGHT = Envelope(0, 0, 1, 3, 0)
_LENGTHS = (10, 300_000, 5, 1_000_000, 0, 70_000)
_GATHERED = [[[0.0, 1.0], [0.0, 1.0, 2.0]]] * 2 + [[[3.0, 3.0], [3.0, 3.0]]]


def _channels(found: Any) -> bool:
    return len(found) == 48 and all(x == [float(s * 10 + t)] * (k + 1) for (s, t, k, _), x in found)


def _says(sent: Envelope) -> Callable[[Any], bool]:
    return lambda said: f"expected {_RIGHT}, but received {sent}" in said


SUITE = [
    *[Expectation("order", order, (), times, lambda found: found == list(range(50))) for times in (1, 3)],
    *[Expectation("many channels", many_channels, (), times, _channels) for times in (1, 3)],
    Expectation("sizes", sizes, (), 1, lambda found: found == [n + k for n in _LENGTHS for k in (2, 0, 1)]),
    Expectation("kinds of tensors", kinds, (), 1, lambda found: found == []),
    *[
        Expectation("changed afterwards", changed_afterwards, (), n, lambda x: x == [0.0, 1000.0, 2000.0, 3000.0])
        for n in (1, 3)
    ],
    Expectation("collectives", collectives, (), 1, lambda found: found == _GATHERED),
    *[
        Expectation("a wrong message is refused", wrong_message, (sent, _RIGHT), 1, _says(sent))
        for sent in (Envelope(0, 0, 1, 4, 0), Envelope(7, 0, 1, 3, 0))
    ],
]


class OnDevices:
    """A transport between devices for scenarios that know the host only: every tensor goes to the device and back."""

    def __init__(self, inner: Any, device: torch.device, program: str) -> None:
        self._inner, self._device, self._program = inner, device, program
        self._there: dict[int, tuple[Tensor, Tensor]] = {}
        """What was sent, and where it lies on the device: what changes here changes there."""
        self.rank, self.num_ranks = inner.rank, inner.num_ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin_step(self, step: int) -> None:
        repeats = self._program.startswith("repeated")
        self._inner.begin_program(self._program, lambda: "data of one form" if repeats else step)
        self._inner.begin_step(step)

    def send(self, envelope: Envelope, target: int, value: Any) -> None:
        self._inner.send(envelope, target, tree_map(self._placed, value))

    def _placed(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in self._there:
            self._there[id(leaf)] = leaf, self._moved(leaf, self._device)
        elif not leaf.requires_grad:
            self._there[id(leaf)][1].copy_(leaf)
        return self._there[id(leaf)][1]

    def take(self, envelope: Envelope) -> Any:
        return tree_map(lambda leaf: self._moved(leaf, HOST), self._inner.take(envelope))

    def all_gather(self, value: Tensor, ranks: Sequence[int], sizes: Sequence[int] | None = None) -> list[Tensor]:
        return [block.cpu() for block in self._inner.all_gather(value.to(self._device), ranks, sizes)]

    def all_reduce(self, value: Tensor, ranks: Sequence[int]) -> None:
        there = value.to(self._device)
        self._inner.all_reduce(there, ranks)
        value.copy_(there)

    def _moved(self, leaf: Any, device: torch.device) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        moved = copied(leaf, device)
        compute_stream(self._device).synchronize()
        return moved


def broken(inner: Any, device: torch.device) -> list[str]:
    """The promises that a transport has not kept, by its rank 1; both ranks call this."""
    found = []
    with current(device):
        for number, (name, scenario, arguments, times, kept) in enumerate(SUITE):
            transport = OnDevices(inner, device, f"{'repeated' if times > 1 else 'single'} {number}")
            try:
                answers = [scenario(transport, *arguments) for _ in range(times)]
                if inner.rank == 1 and not all(map(kept, answers)):
                    found.append(name)
            except AssertionError:
                found.append(name)
            inner.barrier()
    return found


def between_devices(device: torch.device, timeout: float = PATIENCE) -> DeviceTransport:
    """The end of this process, in a group of two, with a route for every kind of message of the suite."""
    skips = {route_of(Envelope(0, source, target, 0, 0), 0, 1) for source, target in product((0, 2, 4), (1, 3))}
    host = between_processes("auto", blocking=False, timeout=timeout)
    transport = DeviceTransport(host, device, direct=True)
    transport.prepare_routes(sorted({Route(0, 1), Route(1, 0)} | skips))
    transport.prepare_groups([[0, 1]])
    return transport
