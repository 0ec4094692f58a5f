"""Schedules as data: written once, then verified, simulated, drawn and executed.

    from vpipe.schedule import build
    from vpipe.schedule.simulate import simulate
    from vpipe.schedule.verify import verify

    program = build("1f1b", 4, 8)
    assert not verify(program)
    simulate(program).makespan          # 33.0

Importing this package loads nothing; each name is fetched from its module when it is first used. (``lower``,
``simulate`` and ``verify`` are named like their modules and are therefore imported from there.) Nothing here imports
torch, so all of it runs on a login node.

Words: docs/glossary.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vpipe.schedule.action import Action, Kind
    from vpipe.schedule.catalog import Entry, build, entries, get
    from vpipe.schedule.placement import Placement
    from vpipe.schedule.program import Program, Versions, from_csv, read_csv, to_csv
    from vpipe.schedule.simulate import Simulation
    from vpipe.schedule.timeline import Costs, StageCosts, uniform
    from vpipe.schedule.violation import Violation

_HOMES = {
    "action": ("Action", "Kind"),
    "catalog": ("Entry", "build", "entries", "get"),
    "placement": ("Placement",),
    "program": ("Program", "Versions", "from_csv", "read_csv", "to_csv"),
    "simulate": ("Simulation",),
    "timeline": ("Costs", "StageCosts", "uniform"),
    "violation": ("Violation",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Action",
    "Costs",
    "Entry",
    "Kind",
    "Placement",
    "Program",
    "Simulation",
    "StageCosts",
    "Versions",
    "Violation",
    "build",
    "entries",
    "from_csv",
    "get",
    "read_csv",
    "to_csv",
    "uniform",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f"vpipe.schedule.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'vpipe.schedule' has no attribute {name!r}")
