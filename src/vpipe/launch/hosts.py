"""Machines, as VPipe lists them, and the network between them.

``machines`` has one ``host:gpu`` per rank. A node is a host; nodes are numbered in the order of first appearance:

    [a:0, b:0, a:1]   ->   node 0: a, ranks 0 and 2, GPUs 0 and 1
                           node 1: b, rank 1, GPU 0
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from vpipe.errors import UserError
from vpipe.launch import command_words as valid
from vpipe.network import family_of, is_loopback

DEVICES = "VPIPE_DEVICES"
"""An index for every local rank: see ``runtime.device.DEVICES``, which a launcher does not load."""
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_MACHINE = re.compile(r"(?P<user>([^@:]*@)?)(?P<host>\[[0-9A-Fa-f:.]+\]|[^@:\[]*)(:(?P<gpu>[0-9]{1,5}))?", re.ASCII)


@dataclass(frozen=True)
class Node:
    """A host with the ranks that run on it."""

    index: int
    host: str
    ranks: tuple[int, ...]
    gpus: tuple[int, ...]
    """One GPU per rank."""

    @property
    def variables(self) -> dict[str, str]:
        """How the ranks of the node are told their devices, of whichever kind: by local rank, two may share one."""
        return {DEVICES: ",".join(map(str, self.gpus))}


def nodes(machines: Sequence[str]) -> list[Node]:
    """The nodes of a list of ``host:gpu``, ``user@host:gpu`` or ``[IPv6]:gpu``; a host alone means its GPU 0."""
    found: dict[str, list[tuple[int, int]]] = {}
    for rank, machine in enumerate(machines):
        where = f"launch.machines[{rank}]"
        match = _MACHINE.fullmatch(machine)
        if match is None:
            raise UserError(f"{where} is {valid.shown(machine)} but must be host:gpu, such as node1:0 or [fe80::1]:0")
        host = valid.destination(match["user"] + match["host"].strip("[]"), where)
        found.setdefault(host, []).append((rank, int(match["gpu"] or 0)))
    return [
        Node(index, host, tuple(rank for rank, _ in places), tuple(gpu for _, gpu in places))
        for index, (host, places) in enumerate(found.items())
    ]


def device_variables(machines: Sequence[str]) -> dict[str, str]:
    """The same where all machines are this one, whatever they call it: local ranks are ranks."""
    gpus = {rank: gpu for node in nodes(machines) for rank, gpu in zip(node.ranks, node.gpus, strict=True)}
    return {DEVICES: ",".join(str(gpus[rank]) for rank in sorted(gpus))} if gpus else {}


def all_local(machines: Sequence[str]) -> bool:
    """Whether the machines are this one, so that no ssh is needed."""
    return all(node.host in LOCAL for node in nodes(machines))


def meeting_point(addresses: Sequence[str]) -> str:
    """The address of node 0, at which all ranks meet; each node's address is the one by which it was reached."""
    loopback = [is_loopback(address) for address in addresses]
    if any(loopback) and not all(loopback):
        here = loopback.index(True)
        raise UserError(
            f"launch.machines names node {here} by the loopback address {addresses[here]}, where the other machines "
            "cannot reach it; write the machine's own name instead of localhost"
        )
    return addresses[0]


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free at this moment."""
    with socket.socket(family_of(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
