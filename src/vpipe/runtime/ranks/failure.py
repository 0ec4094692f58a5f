"""First cause first: how ranks tell each other why they end.

When one rank fails, the others only see that it is gone, each a little later. So a failing rank writes its cause on a
board that all can read, the store at which the ranks met; the first entry stays. A rank that lost another one looks
there before it speaks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from traceback import format_exception_only
from typing import Any

from vpipe.errors import UserError, printable

DONE = "done"
"""The beat of a rank that ended well, and the kind of entry by which the keeper of the store takes its leave."""


class PeerLost(ConnectionError):
    """This rank only saw another one go; ``cause`` says why, once it is known."""

    def __init__(self, sentence: str, peer: int | None = None) -> None:
        super().__init__(sentence)
        self.peer = peer
        self.cause: dict[str, Any] | None = None


@dataclass(frozen=True)
class Cause:
    """Why the run ends.

    ``kind``: error, user (a user's mistake), interrupt; or, as another rank saw it: gone (killed, or ended too early),
    silent (stopped), missing (never came).
    """

    rank: int
    kind: str
    sentence: str
    by: int
    """The rank that wrote this."""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Cause:
        """The cause that an exception of this rank is."""
        if isinstance(error, UserError):
            return cls(rank, "user", str(error), rank)
        kind = "interrupt" if isinstance(error, KeyboardInterrupt) else "error"
        notes = [note for note in getattr(error, "__notes__", []) if note.startswith("vpipe: ")]
        where = f" ({notes[0].removeprefix('vpipe: this happened ')})" if notes else ""
        return cls(rank, kind, "".join(format_exception_only(type(error), error)).splitlines()[0] + where, rank)

    @classmethod
    def parse(cls, text: str | bytes) -> Cause | None:
        """A cause that came over the wire; ``None`` for anything else."""
        try:
            found = json.loads(text)
            rank, by = int(found["rank"]), int(found["by"])
            return cls(rank, printable(str(found["kind"])), printable(str(found["sentence"])), by)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.sentence}" if self.kind in ("error", "user") else self.sentence

    def fields(self) -> dict[str, Any]:
        return asdict(self)


class Board:
    """What the ranks write for each other: one cause, and one beat a rank.

    ``store`` is any store of torch's form. No call waits for a key: beats exist from the meeting on.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank

    def post(self, cause: Cause) -> Cause:
        """Write a cause; the first one stays and is returned."""
        return Cause.parse(self._store.compare_set("end", "", json.dumps(cause.fields()))) or cause

    def read(self) -> Cause | None:
        """The cause, if any rank has one."""
        return Cause.parse(self._store.get("end")) if self._store.check(["end"]) else None

    def beat(self, text: str) -> None:
        """Say that this rank lives, and what it is doing."""
        self._store.set(f"beat/{self._rank}", text)

    def beat_of(self, rank: int) -> str:
        return printable(self._store.get(f"beat/{rank}").decode(errors="replace"))

    def acknowledge(self) -> int:
        """Say that this rank needs the store no more; how many have."""
        return int(self._store.add("acknowledged", 1))

    def num_acknowledged(self) -> int:
        return int(self._store.add("acknowledged", 0))

    def together(self, key: str, num_ranks: int) -> None:
        """Return when all ranks have called this, in all of them at once."""
        if self._store.add(f"{key}/come", 1) == num_ranks:
            self._store.set(f"{key}/go", "")
        self._store.wait([f"{key}/go"])

    def put(self, key: str, facts: Mapping[str, Any]) -> None:
        """Facts of this rank for ``gathered``."""
        self._store.set(f"{key}/{self._rank}", json.dumps(facts))

    def missing(self, key: str, num_ranks: int) -> list[int]:
        """The ranks that have not put their facts yet."""
        if self._store.check([f"{key}/{rank}" for rank in range(num_ranks)]):
            return []
        return [rank for rank in range(num_ranks) if not self._store.check([f"{key}/{rank}"])]

    def gathered(self, key: str, num_ranks: int) -> list[dict[str, Any]]:
        """All ranks' facts; call when none is missing."""
        return [json.loads(found) for found in self._store.multi_get([f"{key}/{rank}" for rank in range(num_ranks)])]


def reason(error: BaseException) -> str:
    """An error of gloo or the store in a few words: without the place in their sources and the advice."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    line = re.sub(r"^\[\S+:\d+\] ", "", line)
    return re.split(r"\. This is typically|\. Original|, key:", line)[0][:120].rstrip(". ")
