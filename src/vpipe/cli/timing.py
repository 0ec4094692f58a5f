"""The costs that ``simulate`` and ``schedules --rank`` take: times of one rank's whole share of a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])


class Numbers(click.ParamType[list[Any]]):
    """``1,1.5,1``, or of whole numbers ``4,8``."""

    name = "x,x,…"

    def __init__(self, kind: type[int] | type[float] = float) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        if isinstance(value, list):
            return value
        try:
            return [self._kind(part) for part in str(value).split(",")]
        except ValueError:
            whole = "whole " if self._kind is int else ""
            self.fail(f"{value!r} is not a list of {whole}numbers such as 1,1,2,1", param, ctx)


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
    return decorated  # type: ignore[no-any-return]  # click's decorators return what they got


scale_option: Callable[[Function], Function] = click.option(
    "--scale", type=Numbers(), help="Relative cost of each stage, such as 1,1,2,1. [all alike]"
)
