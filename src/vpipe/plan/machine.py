"""The ranks a plan is for: memory and speed of each, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vpipe.errors import UserError
from vpipe.plan.costs import Profile
from vpipe.plan.links import Links, Matrix


@dataclass(frozen=True)
class Machine:
    """Memory cap in bytes and relative speed of each rank. Links are the profile's, unless matrices say otherwise."""

    memory: tuple[float, ...]
    speed: tuple[float, ...]
    latency: Matrix | None = None
    """``latency[a][b]``: seconds from rank a to rank b."""
    bandwidth: Matrix | None = None
    """``bandwidth[a][b]``: bytes per second."""

    @classmethod
    def of(
        cls,
        num_ranks: int,
        memory: float | Sequence[float] | None,
        speed: float | Sequence[float] = 1.0,
        links: Links | None = None,
    ) -> Machine:
        """One number for all ranks, or one for each."""
        links = links or Links()
        return cls(
            _per_rank("memory", float("inf") if memory is None else memory, num_ranks),
            _finite("speed", _per_rank("speed", speed, num_ranks)),
            _matrix("latency", links.latency),
            _matrix("bandwidth", links.bandwidth, positive=True),
        )

    @property
    def num_ranks(self) -> int:
        return len(self.memory)

    @property
    def alike(self) -> bool:
        """Whether one rank is as good as another."""
        return len(set(self.memory)) == len(set(self.speed)) == 1 and not self.bandwidth

    def in_order(self, order: Sequence[int]) -> Machine:
        """The same ranks, numbered anew: new rank i is the old rank ``order[i]``."""

        def turned(matrix: Matrix | None) -> Matrix | None:
            return None if matrix is None else tuple(tuple(matrix[a][b] for b in order) for a in order)

        memory, speed = ([values[rank] for rank in order] for values in (self.memory, self.speed))
        return Machine(tuple(memory), tuple(speed), turned(self.latency), turned(self.bandwidth))

    def on(self, profile: Profile, groups: Sequence[Sequence[int]]) -> list[Profile]:
        """Per group of ranks the profile as a stage pays for it that runs on them, the slowest of them.

        What costs more on one rank than on another is stated here and nowhere else.
        """
        speeds = [min(self.speed[rank] for rank in group) for group in groups]
        at_speed = {speed: profile if speed == 1.0 else profile.slower(speed) for speed in speeds}
        return [at_speed[speed] for speed in speeds]

    def lag(self, profile: Profile, sources: Sequence[int], targets: Sequence[int]) -> float:
        """Latency between two groups of ranks, the worst pair; 0 where they are the same ranks."""
        pairs = [(a, b) for a in sources for b in targets if a != b]
        if self.latency is None:
            return profile.link_latency if pairs else 0.0
        return max((self.latency[a][b] for a, b in pairs), default=0.0)

    def seconds_per_byte(self, profile: Profile, sources: Sequence[int], targets: Sequence[int]) -> float:
        """What a byte occupies the link between two groups of ranks, the worst pair."""
        pairs = [(a, b) for a in sources for b in targets if a != b]
        if self.bandwidth is None:
            return 0.0 if profile.link_bandwidth is None or not pairs else 1.0 / profile.link_bandwidth
        return max((1.0 / self.bandwidth[a][b] for a, b in pairs), default=0.0)

    def reduce_time(self, profile: Profile, ranks: Sequence[int], size: float) -> float:
        """A ring over the replicas of a stage: each sends its part of the gradients on, twice round."""
        r = len(ranks)
        if r < 2:
            return 0.0
        byte, lag = self.seconds_per_byte(profile, ranks, ranks), self.lag(profile, ranks, ranks)
        return 2 * (r - 1) * (size / r * byte + lag)


def links_between(num_ranks: int, profile: Profile, given: Links | None) -> Links | None:
    """The links that a user gives, else those that the profile has measured; ``None``: all are alike."""
    if given is not None or profile.links is None:
        return given
    return profile.links.of_ranks(num_ranks, "the profile")


def _per_rank(name: str, value: float | Sequence[float], num_ranks: int) -> tuple[float, ...]:
    values = tuple(float(v) for v in value) if isinstance(value, Sequence) else (float(value),) * num_ranks
    if len(values) != num_ranks:
        raise UserError(f"{name} is given for {len(values)} ranks, but there are {num_ranks}")
    if any(not v > 0 for v in values):
        raise UserError(f"{name} must be more than zero on every rank, not {min(values)}")
    return values


def _finite(name: str, values: tuple[float, ...]) -> tuple[float, ...]:
    for rank, value in enumerate(values):
        if not 1e-6 <= value <= 1e6:
            raise UserError(f"{name} of rank {rank} is {value}, but it is relative: between 0.000001 and 1000000")
    return values


def _matrix(name: str, rows: Matrix | None, *, positive: bool = False) -> Matrix | None:
    if rows is None:
        return None
    for a, row in enumerate(rows):
        for b, value in enumerate(row):
            if a != b and (not math.isfinite(value) or value < 0 or (positive and value == 0)):
                wants = "positive" if positive else "zero or more"
                raise UserError(f"the {name} from rank {a} to rank {b} is {value}; it must be finite and {wants}")
    return rows
