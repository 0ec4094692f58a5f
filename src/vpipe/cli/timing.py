"""The costs that ``simulate`` and ``schedules --rank`` take: times of one rank's whole share of a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])

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
