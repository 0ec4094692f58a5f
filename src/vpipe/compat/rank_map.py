"""VPipe's rank map, a JSON file: which ranks hold which stage, and how far each stage runs ahead.

    {"module_to_stage_map": [0, 1, 2, 3, 3],
     "stage_to_rank_map": {"0": [0, 1], "1": [2], "2": [3], "3": [4]},
     "stage_to_depth_map": {"0": 3, "1": 2, "2": 1, "3": 0},
     "mp_size": 1}

The last module is the loss. Our ranks are numbered stage by stage; ``order`` says which of VPipe's ranks each of ours
is, so that the list of machines can follow. With ``mp_size`` n, VPipe's map names the first rank of each group of n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vpipe.config.problems import ConfigError, Problem, short
from vpipe.errors import nearest

KEYS = ("module_to_stage_map", "stage_to_rank_map", "stage_to_depth_map", "mp_size")
MAX_STAGES = 65536


@dataclass(frozen=True)
class RankMap:
    """What the file says, in our terms."""

    replicas: tuple[int, ...]
    """Ranks of each stage."""
    order: tuple[int, ...]
    """VPipe's rank of each of our ranks."""
    depths: tuple[int, ...] | None
    """Forwards of each stage before its first backward; ``None`` where the file leaves it to the schedule."""
    tensor_parallel_size: int

    @property
    def num_stages(self) -> int:
        return len(self.replicas)


def read_rank_map(value: Any, file: str) -> RankMap:
    """The map, checked. Raises :class:`ConfigError` with every problem."""
    if not isinstance(value, dict):
        raise ConfigError([Problem(f'holds {short(value)} instead of {{"module_to_stage_map": ...}}', (), file)])
    problems = [Problem(f"is an unknown key{nearest(key, KEYS)}", (key,), file) for key in value if key not in KEYS]

    def complain(key: str, text: str) -> None:
        problems.append(Problem(f"is {short(value.get(key))} but {text}", (key,), file))

    modules: Any = value.get("module_to_stage_map")
    if not _is_counts(modules) or len(modules) < 2:
        complain("module_to_stage_map", "must list the stage of every module and of the loss, such as [0, 1, 2, 3, 3]")
        raise ConfigError(problems)
    num_stages = len(modules) - 1
    if modules != [*range(num_stages), num_stages - 1]:
        complain(
            "module_to_stage_map",
            f"must be {short([*range(num_stages), num_stages - 1])}: one module per stage, then the loss",
        )

    size = value.get("mp_size", 1)
    if type(size) is not int or not 1 <= size <= MAX_STAGES:
        complain("mp_size", "must be a whole number, at least 1")
        size = 1

    ranks = [[stage * size] for stage in range(num_stages)]
    given = value.get("stage_to_rank_map")
    if given is not None:
        by_stage = _by_stage(given, num_stages)
        if by_stage is None or not all(_is_counts(each) and each for each in by_stage):
            complain("stage_to_rank_map", f"must give a list of ranks for each of the stages 0 to {num_stages - 1}")
        else:
            ranks = by_stage
    order = [rank for each in ranks for rank in each]
    if sorted(order) != [index * size for index in range(len(order))]:
        complain("stage_to_rank_map", f"must name each of the ranks 0 to {len(order) * size - 1} once")

    depths = None
    if value.get("stage_to_depth_map") is not None:
        depths = _by_stage(value["stage_to_depth_map"], num_stages)
        if depths is None or not _is_counts(depths):
            complain("stage_to_depth_map", f"must give a whole number for each of the stages 0 to {num_stages - 1}")
            depths = None
        elif sorted(depths, reverse=True) != depths:
            complain("stage_to_depth_map", "must fall from stage to stage: the first stage runs ahead the furthest")
    if problems:
        raise ConfigError(problems)
    return RankMap(tuple(map(len, ranks)), tuple(order), None if depths is None else tuple(depths), size)


def _by_stage(mapping: Any, num_stages: int) -> list[Any] | None:
    """The values in the order of the stages; ``None`` unless there is exactly one for each."""
    if not isinstance(mapping, dict) or set(mapping) != {str(stage) for stage in range(num_stages)}:
        return None
    return [mapping[str(stage)] for stage in range(num_stages)]


def _is_counts(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) <= MAX_STAGES and all(type(n) is int and 0 <= n < 2**31 for n in value)
    )
