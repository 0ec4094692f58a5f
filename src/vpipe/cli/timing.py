"""The costs that ``simulate`` and ``schedules --rank`` take: times of one rank's whole share of a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])


class Numbers(click.ParamType[list[float]]):
    """``1,1.5,1``."""

    name = "x,x,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        if isinstance(value, list):
            return value
        try:
            return [float(part) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 1,1,2,1", param, ctx)


TIMES = {
    "forward": (1.0, "F: forward."),
    "input_grad": (1.0, "I: gradient of the input."),
    "weight_grad": (1.0, "W: gradient of the weights."),
    "latency": (0.0, "Of a message, from the end of its transfer to its arrival."),
    "transfer": (0.0, "Time that a message occupies its link."),
    "overhead": (0.0, "Added to every compute action."),
}


def cost_options(command: Function) -> Function:
    """Give ``command`` an option for every time; ``uniform(placement, **times)`` makes costs of them."""
    decorated: Any = command
    for name, (default, meaning) in reversed(TIMES.items()):
        decorated = click.option(
            f"--{name.replace('_', '-')}", type=float, default=default, show_default=True, help=meaning
        )(decorated)
    scale = click.option("--scale", type=Numbers(), help="Relative cost of each stage, such as 1,1,2,1. [all alike]")
    decorated = scale(decorated)
    return decorated  # type: ignore[no-any-return]  # click's decorators return what they got
