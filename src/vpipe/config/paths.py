"""Paths in a config: what is read lies relative to the file that names it, not to where the command was typed.

An override on the command line is typed in a working directory, so its paths are relative to that. What a run writes
(``observe.directory``, ``checkpoint.directory``) goes to the working directory in either case.

A plan in VPipe's form (``{"partition": [...], "recompute_ratio": [...]}``) is read here and becomes part of the config,
so that the resolved config of a run stands by itself. A plan of ``vpipe plan`` says more than a config can and stays a
path; whoever builds the pipeline reads it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vpipe.config.document import read_json
from vpipe.config.problems import ConfigError, Key, Problem, short

if TYPE_CHECKING:
    from vpipe.config.load import Draft

READ: tuple[Key, ...] = (
    ("model", "config"),
    ("model", "directory"),
    ("dataset", "path"),
    ("parallel", "partition"),
    ("parallel", "scheduler"),
    ("launch", "container", "image"),
)


def absolute_paths(draft: Draft, folder: Path) -> None:
    """Make the paths that are read absolute, and take a VPipe plan into the config."""
    for key in READ:
        place: Any = draft.values
        for part in key[:-1]:
            place = place.get(part) if isinstance(place, dict) else None
        name = str(key[-1])
        value = place.get(name) if isinstance(place, dict) else None
        if isinstance(place, dict) and isinstance(value, str) and _is_path(key, value):
            place[name] = absolute(value, Path.cwd() if key in draft.overridden else folder)
    found = draft.values.get("plugins")
    if isinstance(found, list):
        draft.values["plugins"] = [
            absolute(item, folder) if isinstance(item, str) and item.endswith(".py") else item for item in found
        ]
    _take_plan(draft)


def absolute(text: str, folder: Path) -> str:
    """``text`` as an absolute path, seen from ``folder``."""
    return os.path.abspath(folder / os.path.expanduser(text))


def is_program(scheduler: str) -> bool:
    """Whether ``parallel.scheduler`` is the path of a program instead of a name."""
    return scheduler.lower().endswith(".csv")


def _is_path(key: Key, value: str) -> bool:
    if not value or not value.isprintable():
        return False  # refused by its field
    if key == ("parallel", "partition"):
        return value != "auto"
    if key == ("parallel", "scheduler"):
        return is_program(value)
    if key[-1] == "image":
        return value.startswith((".", "/", "~")) or value.endswith((".sif", ".simg"))
    return True


def _take_plan(draft: Draft) -> None:
    """Replace the path of a VPipe plan by its numbers; what the config itself says about recompute stays."""
    parallel = draft.values.get("parallel")
    path = parallel.get("partition") if isinstance(parallel, dict) else None
    if not isinstance(parallel, dict) or not isinstance(path, str) or path in ("", "auto"):
        return
    try:
        plan = read_plan(Path(path))
    except ConfigError as error:
        draft.problems += error.problems
        parallel.pop("partition")
        return
    if not set(plan) <= {"partition", "recompute_ratio"}:
        return
    parallel["partition"] = plan.get("partition", "auto")
    if "recompute_ratio" in plan:
        parallel.setdefault("recompute", plan["recompute_ratio"])


def read_plan(path: Path) -> dict[str, Any]:
    """A plan's JSON: ``partition``, a list of whole numbers, ``recompute_ratio``, or both; of ratios alone the cut is
    found as without a plan. Raises :class:`ConfigError`."""
    plan = read_json(path)

    def fail(text: str, *key: str) -> ConfigError:
        return ConfigError([Problem(text, key, str(path))])

    if not isinstance(plan, dict):
        raise fail(f'holds {short(plan)} instead of a plan: {{"partition": [12, 13, 13, 11], ...}}')
    if not {"partition", "recompute_ratio"} & set(plan):
        raise fail('has no "partition": a plan gives the number of blocks of each stage')
    partition, ratios = plan.get("partition", [1]), plan.get("recompute_ratio", [])
    if not isinstance(partition, list) or not partition or not all(type(n) is int and 0 < n < 2**31 for n in partition):
        raise fail(f"is {short(partition)} but must be a list of whole numbers, at least 1 each", "partition")
    if not isinstance(ratios, list) or not all(type(r) in (int, float) and 0 <= r <= 1 for r in ratios):
        raise fail(f"is {short(ratios)} but must be a list of numbers from 0 to 1", "recompute_ratio")
    if {"partition", "recompute_ratio"} <= set(plan) and len(ratios) != len(partition):
        raise fail(
            f"has {len(ratios)} entries, but partition has {len(partition)}; give one per stage", "recompute_ratio"
        )
    return {str(name): value for name, value in plan.items()}
