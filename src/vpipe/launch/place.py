"""Where the processes of a run live: on this machine (``local_place``), or on those that ssh or srun reach
(``machines``).

    launcher ── fork, tell, signal, save ─────────────▶ place      here: a zygote's socket
             ◀── printed, said, reported, stopped, ended ──         far: lines to a node, which has a place of its own

A *slot* is a place for one process. A ``Leader`` hears the same events from either kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any, Protocol


class Connection(Protocol):
    """What ``subprocess.Popen`` has of a process, which may be the connection to a machine."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class Leader(Protocol):
    """Hears what happens at a place: the launcher, or a node that passes it on."""

    def forked(self, slot: int, pid: int) -> None: ...

    def printed(self, slot: int, number: int, data: bytes) -> None:
        """A process has written to one of its streams: 0 is its stdout, 1 its stderr."""

    def said(self, slot: int, message: dict[str, Any]) -> None:
        """A rank that is led says how it stands: see ``runtime.ranks.control``."""

    def reported(self, slot: int, message: dict[str, Any]) -> None:
        """A rank says why it ends: see ``rank.describe``."""

    def stopped(self, slot: int, seconds: float) -> None:
        """A process that is led was stopped and has given no sign for so long."""

    def ended(self, slot: int, status: int, how: str = "") -> None:
        """A process has ended; ``how`` where that was its machine's end."""

    def broken(self, sentence: str, code: int | None = None) -> None:
        """The place cannot have processes any more."""

    def noted(self, sentence: str) -> None:
        """Something that the user should know."""


class RankPlace(Protocol):
    """Where processes are started, told things and ended."""

    def start(self, spec: dict[str, Any]) -> None:
        """Make ready to fork: ``spec`` has target, arguments, preload and check (see ``local.run``)."""

    def fork(self, slot: int) -> None:
        """Start the process of a slot."""

    def tell(self, slot: int, order: dict[str, Any]) -> None:
        """Give an order to a rank that is led."""

    def signal(self, signum: int, slot: int | None = None) -> None:
        """Send a signal to the process of a slot, or to all."""

    def look(self, now: float) -> None:
        """Tell of processes and machines that give no sign."""

    def seats(self, slots: Sequence[int]) -> dict[int, dict[str, Any]]:
        """What the order of each slot says of where the others are. ``slots`` are in the order of their ranks."""
        return {}

    def has_room(self, slot: int) -> bool:
        """Whether a process may be started there."""
        return True

    def is_clear(self, now: float) -> bool:
        """Whether processes that were lost surely write nothing any more."""
        return True

    def give_back(self, names: Sequence[str], least: int, by: int) -> tuple[list[int], int] | str:
        """Leave these machines when their ranks have left: their slots and how many ranks the others have room for; or
        why that cannot be."""
        return "all ranks are on this machine"

    def save(self) -> Sequence[Connection]:
        """End all ranks and make a checkpoint of the copies in memory: the processes that do so."""

    def drain(self) -> None:
        """Pass on what processes that have ended said last."""

    def close(self) -> None:
        """End whatever is left, and wait for it."""
