"""Which rank comes first, where ranks differ: a fast one for the heavy stage, the slow link where little is sent.

Few ranks have few orders, and all are tried; of many the search exchanges two at a time while that helps. Each order is
planned with little effort, the best once more with all of it. Ranks that are alike are not exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, permutations

from vpipe.errors import UserError
from vpipe.plan.answer import Plan
from vpipe.plan.limits import Limits
from vpipe.plan.machine import Machine

_ALL = 4
"""Up to so many ranks every order is tried."""
_LITTLE = 0.1

Maker = Callable[[Sequence[int], float], Plan]


def orders(machine: Machine, made: Maker, limits: Limits) -> Plan:
    """The best plan over the orders of the ranks that there is time for; the error of the given order where none has a
    plan."""
    given = tuple(range(machine.num_ranks))
    tried: dict[Machine, tuple[float, tuple[int, ...]]] = {}

    def value(order: tuple[int, ...]) -> float:
        turned = machine.in_order(order)
        if turned not in tried:
            if tried and limits.over:
                return float("inf")
            try:
                tried[turned] = made(order, _LITTLE).step_time, order
            except UserError:
                tried[turned] = float("inf"), order
        return tried[turned][0]

    if machine.num_ranks <= _ALL:
        for each in permutations(given):  # the given order first
            value(each)
    else:
        value(given)
        _exchange(given, value)
    best = min(tried.values(), default=(0.0, given))[1]
    return made(best if value(best) < value(given) * (1 - 1e-9) else given, 1.0)


def _exchange(order: tuple[int, ...], value: Callable[[tuple[int, ...]], float]) -> None:
    while True:
        moved = [_swapped(order, a, b) for a, b in combinations(range(len(order)), 2)]
        best = min(moved, key=value)
        if value(best) >= value(order) * (1 - 1e-9):
            return
        order = best


def _swapped(order: tuple[int, ...], a: int, b: int) -> tuple[int, ...]:
    turned = list(order)
    turned[a], turned[b] = turned[b], turned[a]
    return tuple(turned)
