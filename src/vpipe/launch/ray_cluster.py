"""Ranks as actors of a Ray cluster: one actor a rank, placed together or not at all.

Ray finds the places (a placement group: all of them, or the job waits) and is the connection: in each actor runs the
same node as at the far end of an ssh connection (``node``), and the same launcher leads them.

    vpipe submit --to ray ──▶ placement group ──▶ actor 0 ── node ── rank 0 ──┐
                                             └──▶ actor 1 ── node ── rank 1 ──┴── meet at actor 0's address

The ranks are processes, not threads of actors: a rank whose run has failed elsewhere leaves by ending its process, and
an actor that is killed takes its rank along.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

from vpipe.errors import UserError
from vpipe.launch.host_link import HostLink
from vpipe.launch.hosts import Node
from vpipe.launch.machines import run as run_on
from vpipe.launch.ssh import SshLaunch
from vpipe.launch.stopping import Grace
from vpipe.process import AS_MODULE

Show = Callable[[str], None]

PLACES_WITHIN = 60.0
"""Seconds until it is said what the job waits for."""
ANSWERS_WITHIN = 5.0
"""Seconds in which something must listen at the address of a cluster."""


@dataclass(frozen=True)
class RayJob:
    """What is asked of the cluster."""

    command: tuple[str, ...]
    """What each rank runs: words after the Python program."""
    num_ranks: int
    launch: SshLaunch
    """How a node is started in an actor."""
    address: str = "auto"
    """Of the cluster; ``auto`` takes the one that this machine belongs to."""
    cpus_per_task: int = 1
    gpus_per_task: int = 0
    spread: bool = False
    """Whether ranks go to as many machines as there are, instead of as few."""
    grace: float | None = None


class RayNode:
    """The actor: a node in the cluster, and its pipes."""

    def address(self) -> str:
        """This machine's address in the cluster."""
        return str(load().util.get_node_ip_address())

    def start(self, python: str, directory: str) -> str:
        """Start the node; why that cannot be."""
        words = [python, AS_MODULE, "vpipe.launch.node", self.address()]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(words, cwd=directory, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return ""

    def hear(self, data: bytes) -> None:
        """What the launcher says; nothing at its end."""
        assert self._process.stdin is not None
        with suppress(OSError):
            if data:
                self._process.stdin.write(data)
                self._process.stdin.flush()
            else:
                self._process.stdin.close()

    def say(self) -> bytes:
        """What the node has said since the last call; waits for it, and is empty at the end."""
        assert self._process.stdout is not None
        return os.read(self._process.stdout.fileno(), 1 << 16)


class RayConnection:
    """What an ssh process is elsewhere: pipes to a node, and its end."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        hears, told = os.pipe()
        said, says = os.pipe()
        self.stdin: IO[bytes] | None = os.fdopen(told, "wb")
        self.stdout: IO[bytes] | None = os.fdopen(said, "rb", buffering=0)
        os.set_blocking(said, False)
        self._ended = threading.Event()
        for work, fd in ((self._pass_orders, hears), (self._pass_words, says)):
            threading.Thread(target=work, args=(fd,), daemon=True).start()

    def _pass_orders(self, fd: int) -> None:
        with os.fdopen(fd, "rb", buffering=0) as orders:
            while data := orders.read(1 << 16):
                self._actor.hear.options(concurrency_group="orders").remote(data)
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actor.hear.options(concurrency_group="orders").remote(b""))

    def _pass_words(self, fd: int) -> None:
        with suppress(self._ray.exceptions.RayError, OSError), os.fdopen(fd, "wb", buffering=0) as words:
            while data := self._ray.get(self._actor.say.remote()):
                words.write(data)
        self._ended.set()

    def poll(self) -> int | None:
        return 1 if self._ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(["ray"], timeout or 0.0)
        return 1

    def kill(self) -> None:
        self._ray.kill(self._actor)
        self._ended.set()


def load() -> Any:
    """Ray, if it is here."""
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed; 'pip install ray' on every machine of the cluster") from None
    return ray


def run(job: RayJob, show: Show) -> int:
    """Run the job to its end; the exit code. Ctrl-C ends all ranks and gives the places back."""
    ray = load()
    _refuse_silent(job.address)
    try:
        ray.init(address=job.address, log_to_driver=False, logging_level="ERROR")
    except ConnectionError:
        raise UserError(_no_cluster(job.address)) from None
    places = None
    try:
        places = _places(ray, job, show)
        ways = partial(_connections, ray, job, places)
        grace = None if job.grace is None else Grace(lambda: job.grace or 0.0)
        return run_on(job.launch, job.command, job.num_ranks, grace=grace, connections=ways)
    finally:
        if places is not None:
            ray.util.remove_placement_group(places)  # with it end the actors that are left
        ray.shutdown()


def _no_cluster(address: str) -> str:
    return f"there is no Ray cluster at {address}; start one with 'ray start --head', or give --with address=…"


def _refuse_silent(address: str) -> None:
    """Raise where nothing listens: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWERS_WITHIN).close()
        except (OSError, OverflowError):
            raise UserError(_no_cluster(address)) from None


def _places(ray: Any, job: RayJob, show: Show) -> Any:
    """A bundle for each rank, all at once."""
    bundle = {"CPU": job.cpus_per_task} | ({"GPU": job.gpus_per_task} if job.gpus_per_task else {})
    places = ray.util.placement_group([bundle] * job.num_ranks, strategy="SPREAD" if job.spread else "PACK")
    if not places.wait(PLACES_WITHIN):
        free = {name: ray.available_resources().get(name, 0) for name in bundle}
        show(f"vpipe: waiting for {job.num_ranks} places with {bundle} each; the cluster has {free} free")
        ray.get(places.ready())
    return places


def _connections(ray: Any, job: RayJob, places: Any) -> list[HostLink]:
    """An actor with a node for each rank; local ranks are counted machine by machine."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actor = ray.remote(concurrency_groups={"orders": 1})(RayNode)
    seats = [
        actor.options(
            num_cpus=job.cpus_per_task,
            num_gpus=job.gpus_per_task,
            scheduling_strategy=PlacementGroupSchedulingStrategy(places, placement_group_bundle_index=rank),
        ).remote()
        for rank in range(job.num_ranks)
    ]
    hosts = ray.get([seat.address.remote() for seat in seats])
    problems = ray.get([seat.start.remote(job.launch.python, job.launch.directory) for seat in seats])
    for host, problem in zip(hosts, problems, strict=True):
        if problem:
            raise UserError(f"a rank cannot be started on {host}: {problem}; see --with python=…")
    nodes = nodes_of(hosts)
    return [HostLink(node, RayConnection(ray, seat)) for node, seat in zip(nodes, seats, strict=True)]


def nodes_of(hosts: Sequence[str]) -> list[Node]:
    """A node for each rank. Ray shows each its own devices alone, so that every local rank takes the first."""
    return [Node(rank, host, (rank,), (0,) * hosts.count(host)) for rank, host in enumerate(hosts)]
