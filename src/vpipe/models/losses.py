"""The losses of the models, each a mean over valid targets that is zero, not NaN, where no target is valid.

They are small frozen objects, not closures, so that a model can travel to another process.

Whether a model's loss can use what it says to a data set is tried with a few rows, before anything is trained. Little
is computed: the output is asked by shapes alone, or of a model that is built to be tried; the loss is asked with the
real targets, and with numbers in the place of what the model says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vpipe.errors import printable
from vpipe.layer import describe
from vpipe.models.model import Model, run

IGNORED = -100
"""The target of a position that does not count, in language models."""


def masked_cross_entropy(logits: Tensor, targets: Tensor, ignored: int, smoothing: float = 0.0) -> Tensor:
    """The mean cross entropy, in fp32, over the targets that are not ``ignored``."""
    total = F.cross_entropy(
        logits.flatten(0, -2).float(),
        targets.flatten().long(),
        ignore_index=ignored,
        reduction="sum",
        label_smoothing=smoothing,
    )
    return total / (targets != ignored).sum().clamp(min=1)


class CountedLoss:
    """What our losses are: they say which labels count (``Model.count``) and which value does not."""

    ignored: int

    def labels(self, targets: Any) -> Tensor:
        """Those that count, of targets that may have more."""
        made: Tensor = targets
        return made

    def count(self, targets: Any) -> int:
        return int((self.labels(targets) != self.ignored).sum())


@dataclass(frozen=True)
class TokenLoss(CountedLoss):
    """Cross entropy of logits ``(..., vocab)`` with targets ``(...)``; where the output is ``(logits, extra)``, as of
    models with experts, the extra loss is added."""

    ignored: int = IGNORED
    smoothing: float = 0.0
    """Label smoothing as in torch: this share of the probability is spread evenly over the vocabulary."""

    @property
    def judging(self) -> TokenLoss:
        return replace(self, smoothing=0.0)

    def __call__(self, output: Tensor | tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        logits, extra = output if isinstance(output, tuple | list) else (output, None)
        loss = masked_cross_entropy(logits, targets, self.ignored, self.smoothing)
        return loss if extra is None else loss + extra


@dataclass(frozen=True)
class MaskedLoss(CountedLoss):
    """Cross entropy over the masked tokens; of targets with a next sentence, that is left out."""

    ignored: int = -1

    def labels(self, targets: Any) -> Tensor:
        return targets if isinstance(targets, Tensor) else split_targets(targets)[0]

    def __call__(self, output: Any, targets: Any) -> Tensor:
        return masked_cross_entropy(output, self.labels(targets), self.ignored)


@dataclass(frozen=True)
class PretrainingLoss(MaskedLoss):
    """BERT's: cross entropy over the masked tokens plus cross entropy of the next-sentence question.

    The output is ``(token logits, sentence logits)``; the targets are ``masked_labels (B, L)``, ``ignored`` where
    nothing is masked, and ``next_sentence (B,)``. Each part is a mean over its own count, as in the original: in a unit
    of a batch it weighs as ``weighed`` says."""

    def __call__(self, output: Any, targets: Any) -> Tensor:
        labels, next_sentence, *weights = split_targets(targets)
        parts = zip(output, (labels, next_sentence), strict=True)
        tokens, sentences = (masked_cross_entropy(said, right, self.ignored) for said, right in parts)
        return tokens * weights[0][0] + sentences * weights[0][1] if weights else tokens + sentences

    def count_apart(self, targets: Any) -> int:
        return int((split_targets(targets)[1] != self.ignored).sum())


def split_targets(targets: Any) -> Sequence[Tensor]:
    """(labels, next sentence) of a mapping with these names, or of a pair; then what each weighs, if it says so."""
    if isinstance(targets, tuple | list):
        return targets
    return [targets[name] for name in ("masked_labels", "next_sentence", WEIGHTS) if name != WEIGHTS or name in targets]


WEIGHTS = "weights"


def weighed(targets: Any, weights: Tensor) -> Any:
    """The targets of a loss of two parts, and what each part weighs."""
    if isinstance(targets, Mapping):
        return {**targets, WEIGHTS: weights}
    return targets and (*targets, weights)


@dataclass(frozen=True)
class SquaredError:
    """The mean squared difference; targets of any number type, all of which count."""

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets.to(output.dtype)).square().mean()

    def count(self, targets: Tensor) -> int:
        return int(torch.as_tensor(targets).numel())


@dataclass(frozen=True)
class OwnLoss:
    """The loss that the model has computed by itself, a mean over examples."""

    def __call__(self, output: Tensor, targets: Any) -> Tensor:
        return output

    def count(self, targets: Any) -> int:
        return _rows(targets)


MOST_NUMBERS = 1 << 23
"""Numbers of a model's output that the loss is asked with."""


def first_output(model: Model, blank: Sequence[nn.Module] | None, inputs: Mapping[str, Any]) -> Any:
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
