"""Machines that ssh or srun reach: one node on each starts the processes of its slots and passes on what they say.

    launcher ═ssh═ node a ── slots 0, 2        a rank is lost:     its node starts another one in its place
             ═ssh═ node b ── slots 1, 3        a machine is lost:  its ranks are; a spare slot elsewhere, or fewer go on

The launcher decides as on one machine. What is here: where a slot is, when a machine is taken for lost, and how long
the others wait until it surely writes nothing any more (``node``: the lease).
"""

from __future__ import annotations

import os
import secrets
import select
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from vpipe.door import SECRET
from vpipe.launch import hosts, slurm_nodes
from vpipe.launch.environment import carried, interface_variables
from vpipe.launch.epochs import Elastic
from vpipe.launch.events import EventLoop
from vpipe.launch.host_link import HELLO_SECONDS, HostLink, connected
from vpipe.launch.launcher import Launcher
from vpipe.launch.lead import lead
from vpipe.launch.node import LEASE
from vpipe.launch.output import Output
from vpipe.launch.place import Connection, Leader
from vpipe.launch.process import signal_name
from vpipe.launch.ssh import SshLaunch
from vpipe.launch.stopping import Grace
from vpipe.rundir.journal import Beat
from vpipe.store import STORE

MOST_READS = 1024
"""At the end of a run: others may write for ever."""
SILENT = 2.0
"""Seconds without a sign after which a machine is taken for lost; more where it has been late before."""
SURELY = 0.5
"""Seconds beyond the lease, until the others go on."""
END_WITHIN = 7.0
PASSED_ON = ("forked", "printed", "reported", "said", "stopped", "ended", "noted")
"""What a node says that is the launcher's affair: methods of ``Leader``."""


class Machines:
    """The machines of a run: the place of a launcher whose ranks are elsewhere."""

    def __init__(
        self,
        launch: SshLaunch,
        events: EventLoop,
        leader: Leader,
        elastic: Elastic | None,
        connections: Callable[[], list[HostLink]],
    ) -> None:
        self._launch, self._events, self._leader, self._elastic = launch, events, leader, elastic
        self._connections = connections
        self._machines: list[HostLink] = []
        self._fence = 0.0
        """Before this moment a machine that is lost may still write."""

    def start(self, spec: dict[str, Any]) -> None:
        self._machines = self._connections()
        deadline = monotonic() + HELLO_SECONDS
        for machine in self._machines:
            machine.greet(deadline, self._launch.through)
        meeting = hosts.meeting_point([machine.address for machine in self._machines])
        secret = secrets.token_hex(32)
        for machine in self._machines:
            machine.send(self._order(machine, spec, meeting, secret))
            machine.seen = machine.leased = monotonic()
            assert machine.process.stdout is not None
            self._events.watch(machine.process.stdout, partial(self._read, machine))

    def _order(self, machine: HostLink, spec: Mapping[str, Any], meeting: str, secret: str) -> dict[str, Any]:
        launch, node, elastic = self._launch, machine.node, self._elastic
        variables = interface_variables(launch.interface or machine.interface) | carried(os.environ)
        variables |= spec["environment"] | node.variables | {SECRET: secret, "PYTHONUNBUFFERED": "1"}
        order: dict[str, Any] = {"spec": spec, "environment": variables, "slots": node.ranks}
        order |= {"threads": launch.threads, "address": machine.address, "num_ranks": len(self._mates(machine))}
        first = self._machines[0]
        variables |= {
            "WORLD_SIZE": str(sum(len(other.node.ranks) for other in self._machines)),
            "LOCAL_WORLD_SIZE": str(len(self._mates(machine))),
            "GROUP_RANK": str(node.index),
            "MASTER_ADDR": meeting,
            "MASTER_PORT": str(launch.port or first.port),
            STORE: f"{meeting}:{first.store}",
        }
        if elastic is None:
            return order | {"elastic": None}
        launcher = first.node.host if launch.through == "srun" else ""
        return order | {"elastic": {"most": elastic.most, "saves": elastic.saves, "launcher": launcher}}

    # --- what the machines say ----------------------------------------------------------------------------------------

    def _read(self, machine: HostLink) -> bool:
        """Hear what has come; whether more may."""
        messages = machine.messages()
        if messages is None:
            self._forget(machine)
            return False
        now = monotonic()
        if messages:
            machine.longest, machine.seen = max(machine.longest, now - machine.seen), now
        for name, *values in messages:
            if machine.lives:
                self._hear(machine, name, values)
        return True

    def _hear(self, machine: HostLink, name: str, values: list[Any]) -> None:
        if name == "beat":
            machine.leased = monotonic()
            machine.send({"lease": values[0]})
        elif name == "keeper":
            machine.keeper = int(values[0])
        elif name == "broken":
            self._leader.broken(f"{machine.node.host}: {values[0]}", values[1])
        elif name in PASSED_ON:
            if name == "printed":
                values[2] = values[2].encode("latin-1")
            elif name == "ended":
                machine.living.discard(int(values[0]))
            getattr(self._leader, name)(*values)

    def look(self, now: float) -> None:
        for machine in self._machines:
            code = machine.process.poll()
            if not machine.lives:
                continue
            if machine.leaving and not machine.living:
                self._let_go(machine, code)
            elif code is not None:
                self._read_all(machine)
                how = f"{self._launch.through} ended by {signal_name(-code)}"
                self._lose(machine, how if code < 0 else "the connection is lost")
            elif self._elastic is not None and now - machine.seen > max(SILENT, 3 * machine.longest):
                self._lose(machine, f"no sign for {now - machine.seen:.1f} s")

    def _lose(self, machine: HostLink, how: str) -> None:
        """A machine is gone, or cannot be reached: it will have ended its ranks when its lease is over."""
        machine.lives = False
        self._fence = max(self._fence, machine.leased + LEASE + SURELY)
        self._leader.noted(f"{machine.node.host} is lost: {how}")
        self._forget(machine)
        machine.process.kill()
        lost, machine.living = sorted(machine.living), set()
        for slot in lost:
            self._leader.ended(slot, -9, f"is lost with {machine.node.host}")

    def _forget(self, machine: HostLink) -> None:
        assert machine.process.stdout is not None
        self._events.forget(machine.process.stdout)

    # --- what they are told -------------------------------------------------------------------------------------------

    def _of(self, slot: int) -> HostLink:
        return next(machine for machine in self._machines if slot in machine.node.ranks)

    def _mates(self, machine: HostLink) -> list[int]:
        """The slots of its host, which may have several nodes."""
        return sorted(
            slot for other in self._machines if other.node.host == machine.node.host for slot in other.node.ranks
        )

    def fork(self, slot: int) -> None:
        machine = self._of(slot)
        machine.living.add(slot)
        own = {"RANK": str(slot), "LOCAL_RANK": str(self._mates(machine).index(slot))}
        machine.send({"fork": slot, "variables": own})

    def tell(self, slot: int, order: dict[str, Any]) -> None:
        self._of(slot).send({"tell": slot, "order": order})

    def signal(self, signum: int, slot: int | None = None) -> None:
        for machine in self._machines if slot is None else [self._of(slot)]:
            machine.send({"signal": int(signum), "slot": slot})

    def has_room(self, slot: int) -> bool:
        return self._of(slot) in self._staying()

    def is_clear(self, now: float) -> bool:
        return now >= self._fence

    def _staying(self) -> list[HostLink]:
        return [machine for machine in self._machines if machine.lives and not machine.leaving]

    def seats(self, slots: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Where the ranks meet, and to which other machine each sends its copies."""
        first = self._of(slots[0])
        living = self._staying()
        found = {}
        for slot in slots:
            machine = self._of(slot)
            mates = [other for other in slots if other in machine.node.ranks]
            other = living[(living.index(machine) + 1) % len(living)]
            found[slot] = {
                "meet": [first.address, first.store],
                "local_rank": mates.index(slot),
                "local_size": len(mates),
                "group_rank": machine.node.index,
                "guest": [other.address, other.keeper] if other is not machine else None,
            }
        return found

    def give_back(self, names: Sequence[str], least: int, by: int) -> tuple[list[int], int] | str:
        staying = [machine for machine in self._staying() if machine.node.host not in names]
        going = [machine for machine in self._staying() if machine not in staying]
        room = sum(len(machine.node.ranks) for machine in staying) // by * by
        first = f"{self._machines[0].node.host}, where its launcher is" if self._launch.through == "srun" else ""
        if not going or room < least or (first and self._machines[0] in going):
            needed = " and ".join(filter(None, (f"{least} places", first)))
            others = ", ".join(machine.node.host for machine in staying) or "no machine"
            return f"the run needs {needed}, and would have {room} on {others}"
        for machine in going:
            machine.leaving = True
        return [slot for machine in going for slot in machine.node.ranks], room

    def _let_go(self, machine: HostLink, code: int | None) -> None:
        """Tell a machine that is given back, and has no ranks any more, to end."""
        machine.send({"over": True})
        if code is None:
            return
        machine.lives = False
        self._forget(machine)
        self._leader.noted(f"{machine.node.host} is given back")
        if self._launch.through == "srun":
            slurm_nodes.shrink([other.node.host for other in self._staying()], self._launch.run_directory)

    # --- the end ------------------------------------------------------------------------------------------------------

    def save(self) -> list[Connection]:
        """Every machine has some of the copies, and knows what to do with them."""
        for machine in self._machines:
            machine.send({"save": True})
        return [machine.process for machine in self._machines if machine.lives]

    def drain(self) -> None:
        for machine in self._machines:
            if machine.lives:
                self._read_all(machine)

    def _read_all(self, machine: HostLink) -> None:
        stdout = machine.process.stdout
        assert stdout is not None
        all(select.select([stdout], [], [], 0)[0] and self._read(machine) for _ in range(MOST_READS))

    def close(self) -> None:
        for machine in self._machines:
            machine.send({"over": True})
            assert machine.process.stdin is not None
            with suppress(OSError):
                machine.process.stdin.close()
        for machine in self._machines:
            try:
                machine.process.wait(END_WITHIN if machine.lives else 0)
            except subprocess.TimeoutExpired:
                machine.process.kill()
                machine.process.wait()
            self._forget(machine)
            assert machine.process.stdout is not None
            machine.process.stdout.close()


def run(
    launch: SshLaunch,
    target: Sequence[str] | str,
    num_ranks: int,
    *,
    grace: Grace | float | None = None,
    elastic: Elastic | None = None,
    connections: Callable[[], list[HostLink]] | None = None,
    **options: Any,
) -> int:
    """``lead`` (which has the other ``options``) on the machines of ``launch``. ``connections``: how they are reached,
    instead of by ``launch.through``."""

    def there(launcher: Launcher, output: Output) -> Machines:
        return Machines(launch, launcher.events, launcher, elastic, connections or partial(connected, launch))

    patience = grace or Grace(partial(Beat.patience, launch.run_directory))
    return lead(target, num_ranks, there, grace=patience, elastic=elastic, **options)
