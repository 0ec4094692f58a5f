"""Ranks as actors of a Ray cluster: one actor a rank, placed together or not at all.

Ray finds the places (a placement group: all of them, or the job waits), the actors start the ranks as processes of
their own, as the far end of an ssh connection does (``launch.remote``), and this process shows what they say.

    vpipe submit --to ray ──▶ placement group ──▶ actor 0 ──▶ rank 0 ──┐
                                             └──▶ actor 1 ──▶ rank 1 ──┴── meet at actor 0's address

The ranks are processes, not threads of actors: a rank whose run has failed elsewhere leaves by ending its process, and
an actor that is killed takes its rank along.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vpipe.errors import UserError
from vpipe.launch.environment import carried, interface_variables
from vpipe.launch.hosts import DEVICES, free_port
from vpipe.launch.remote import NodeRanks, Order

Show = Callable[[str], None]

PLACES_WITHIN = 60.0
"""Seconds until it is said what the job waits for."""


@dataclass(frozen=True)
class RayJob:
    """What is asked of the cluster."""

    command: tuple[str, ...]
    """What each rank runs."""
    num_ranks: int
    directory: str
    address: str = "auto"
    """Of the cluster; ``auto`` takes the one that this machine belongs to."""
    cpus_per_task: int = 1
    gpus_per_task: int = 0
    spread: bool = False
    """Whether ranks go to as many machines as there are, instead of as few."""
    interface: str | None = None
    threads: int = 0


class RayRank:
    """One rank's place in the cluster."""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stopped = threading.Event()

    def address(self) -> tuple[str, int]:
        """This machine's address in the cluster, and a port that is free on it."""
        host = str(load().util.get_node_ip_address())
        return host, free_port(host)

    def run(self, order: str) -> int:
        """Start the rank and wait for its end; the exit code."""
        return NodeRanks(Order.parse(order), self).wait(self._stopped)

    def write(self, text: str) -> int:
        """What the rank says, line by line."""
        self._said.put(text)
        return len(text)

    def flush(self) -> None:
        """Every line is on its way as soon as it is written."""

    def said(self) -> list[str]:
        """What was said since the last call; waits a moment for the first line."""
        lines: list[str] = []
        try:
            lines.append(self._said.get(timeout=0.5))
            while True:
                lines.append(self._said.get_nowait())
        except queue.Empty:
            return lines

    def stop(self) -> None:
        """End the rank."""
        self._stopped.set()


def load() -> Any:
    """Ray, if it is here."""
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed; 'pip install ray' on every machine of the cluster") from None
    return ray


def orders(job: RayJob, hosts: Sequence[str], port: int, environ: Mapping[str, str]) -> list[Order]:
    """What each seat is asked to run: torch's variables, local ranks counted machine by machine."""
    common = carried(environ) | interface_variables(job.interface)
    if job.threads:
        common["OMP_NUM_THREADS"] = str(job.threads)
    common |= {
        "WORLD_SIZE": str(job.num_ranks),
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
    }
    found = []
    for rank, host in enumerate(hosts):
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(hosts[:rank].count(host)),
            "LOCAL_WORLD_SIZE": str(hosts.count(host)),
        }
        if job.gpus_per_task:  # Ray shows each its own alone
            own[DEVICES] = ",".join(["0"] * hosts.count(host))
        found.append(Order(job.command, job.directory, common, {str(rank): own}))
    return found


def run(job: RayJob, show: Show) -> int:
    """Run the job to its end; the first bad exit code. Ctrl-C ends all ranks and gives the places back."""
    ray = load()
    try:
        ray.init(address=job.address, log_to_driver=False, logging_level="ERROR")
    except ConnectionError:
        raise UserError(
            f"there is no Ray cluster at {job.address}; start one with 'ray start --head', or name it with --address"
        ) from None
    places = None
    try:
        places = _places(ray, job, show)
        seats = _seats(ray, job, places)
        return _follow(ray, job, seats, show)
    finally:
        if places is not None:
            ray.util.remove_placement_group(places)  # with it end the actors that are left
        ray.shutdown()


def _places(ray: Any, job: RayJob, show: Show) -> Any:
    """A bundle for each rank, all at once."""
    bundle = {"CPU": job.cpus_per_task} | ({"GPU": job.gpus_per_task} if job.gpus_per_task else {})
    places = ray.util.placement_group([bundle] * job.num_ranks, strategy="SPREAD" if job.spread else "PACK")
    if not places.wait(PLACES_WITHIN):
        free = {name: ray.available_resources().get(name, 0) for name in bundle}
        show(f"vpipe: waiting for {job.num_ranks} places with {bundle} each; the cluster has {free} free")
        ray.get(places.ready())
    return places


def _seats(ray: Any, job: RayJob, places: Any) -> list[Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    actor = ray.remote(RayRank)
    return [
        actor.options(
            num_cpus=job.cpus_per_task,
            num_gpus=job.gpus_per_task,
            max_concurrency=4,
            scheduling_strategy=PlacementGroupSchedulingStrategy(places, placement_group_bundle_index=rank),
        ).remote()
        for rank in range(job.num_ranks)
    ]


def _follow(ray: Any, job: RayJob, seats: Sequence[Any], show: Show) -> int:
    """Start the ranks, show what they say, and end together."""
    found = ray.get([seat.address.remote() for seat in seats])
    hosts = [host for host, _ in found]
    asked = orders(job, hosts, found[0][1], os.environ)
    ends = {seat.run.remote(order.line()): rank for rank, (seat, order) in enumerate(zip(seats, asked, strict=True))}
    talks = {seat.said.remote(): rank for rank, seat in enumerate(seats)}
    code = 0
    try:
        while ends:
            (ready,), _ = ray.wait([*ends, *talks], num_returns=1)
            rank = ends.get(ready, talks.get(ready, 0))
            try:
                answer = ray.get(ready)
            except ray.exceptions.RayActorError:
                ends = {end: other for end, other in ends.items() if other != rank}
                talks = {talk: other for talk, other in talks.items() if other != rank}
                show(f"vpipe: the place of rank {rank} on {hosts[rank]} is lost; the other ranks are ended")
                code = code or 1
                _stop(ray, seats)
                continue
            if ready in talks:
                del talks[ready]
                _show(answer, show)
                talks[seats[rank].said.remote()] = rank
            else:
                del ends[ready]
                code = code or int(answer)
        for talk in talks:
            _show(_last(ray, talk), show)
    except KeyboardInterrupt:
        _stop(ray, seats)
        ray.wait(list(ends), num_returns=len(ends), timeout=10)
        raise
    return code


def _show(lines: Sequence[str], show: Show) -> None:
    for line in lines:
        show(line.rstrip("\n"))


def _last(ray: Any, talk: Any) -> list[str]:
    try:
        return list(ray.get(talk, timeout=5))
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return []


def _stop(ray: Any, seats: Sequence[Any]) -> None:
    del ray
    for seat in seats:
        seat.stop.remote()
