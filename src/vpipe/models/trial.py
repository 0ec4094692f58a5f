"""A model tried with a few rows, before anything is trained: what it says to them, and whether its loss can use that.

Nothing is trained and little computed. The output is asked by shapes alone, or of a model that is built to be tried;
the loss is asked with the real targets, and with numbers in the place of what the model says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.errors import printable
from vpipe.layer import describe
from vpipe.models.model import Model, run

MOST_NUMBERS = 1 << 23
"""Numbers of a model's output that the loss is asked with."""


def output(model: Model, blank: Sequence[nn.Module] | None, inputs: Mapping[str, Any]) -> Any:
    """What the model says to the first row of these inputs: by the shapes of its ``blank`` modules alone, or where they
    are not given by values, of modules that are built for it."""
    row = _first(inputs, 1)
    with torch.no_grad():
        if blank is None:
            return run(model.layers, model.build(), row)
        with torch.device("meta"):
            return run(model.layers, blank, _mapped(row, lambda tensor: tensor.to("meta")))


def problem_of_loss(model: Model, targets: Any, output: Any) -> str:
    """Why the loss cannot use these targets for such an output of one row; empty where it can. Where shapes did not
    tell what the model says (``None``), only whether the targets can be counted."""
    numbers = sum(tensor.numel() for tensor in _tensors(output))
    by_row = all(tensor.shape[0] == 1 for tensor in _tensors(output) if tensor.ndim)
    count = max(1, min(_rows(targets), MOST_NUMBERS // max(1, numbers))) if by_row else 1
    random = torch.Generator().manual_seed(0)

    def said(tensor: Tensor) -> Tensor:
        shape = (count * tensor.shape[0], *tensor.shape[1:]) if tensor.ndim else ()
        return torch.rand(shape, generator=random).to(tensor.dtype)  # also where probabilities are wanted

    targets = _first(targets, count)
    for_output = f", for an output of {_told(output)}" if output is not None else ""
    answer = _mapped(output, said)
    try:
        with torch.no_grad():
            model.count(targets)
            if output is not None:
                model.loss(answer, targets)
    except Exception as error:
        return f"({_told(targets)}{for_output}): {type(error).__name__}: {printable(str(error), 300)}"
    return ""


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return " and ".join(f"{name}: {describe(each)}" for name, each in value.items())
    return " and ".join(map(describe, value)) if isinstance(value, tuple | list) else describe(value)


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same mapping, list or tuple with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(each, change) for name, each in value.items()}
    return type(value)(_mapped(each, change) for each in value) if isinstance(value, tuple | list) else value


def _first(value: Any, count: int) -> Any:
    """The first rows of everything."""
    return _mapped(value, lambda tensor: tensor[:count] if tensor.ndim else tensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _rows(value: Any) -> int:
    return min((tensor.shape[0] for tensor in _tensors(value) if tensor.ndim), default=1)
