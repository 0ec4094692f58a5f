"""Machines, as VPipe lists them, and the network between them.

``machines`` has one ``host:gpu`` per rank. A node is a host; nodes are numbered in the order of first appearance:

    [a:0, b:0, a:1]   ->   node 0: a, ranks 0 and 2, GPUs 0 and 1
                           node 1: b, rank 1, GPU 0
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from vpipe.errors import UserError
from vpipe.launch import valid
from vpipe.network import is_loopback

DEVICES = "VPIPE_DEVICES"
"""An index for every local rank: see ``runtime.device.DEVICES``, which a launcher does not load."""
LOCAL = frozenset({"localhost", "127.0.0.1"})


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
    """The nodes of a list of ``host:gpu``; a host alone means its GPU 0."""
    found: dict[str, list[tuple[int, int]]] = {}
    for rank, machine in enumerate(machines):
        host, colon, gpu = machine.partition(":")
        valid.host(host, f"launch.machines[{rank}]")
        if colon and not (gpu.isascii() and gpu.isdigit() and len(gpu) <= 5):
            raise UserError(f"launch.machines[{rank}] is {valid.shown(machine)} but must be host:gpu, such as node1:0")
        found.setdefault(host, []).append((rank, int(gpu or 0)))
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


def machinefile(machines: Sequence[str]) -> str:
    """VPipe's ``machinefile``: one ``host:gpu`` a line, in the order of the ranks."""
    return "".join(f"{machine}\n" for machine in machines)


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
    """A port that nobody listens on at this moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
