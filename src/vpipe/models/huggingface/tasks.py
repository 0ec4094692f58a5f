"""What a model is trained on: which values it takes, what of its result leaves the pipeline, and which loss follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from vpipe.errors import UserError
from vpipe.models.losses import IGNORED, MaskedLoss, OwnLoss, PretrainingLoss, TokenLoss


def _remedy(model: Any) -> str:
    """What a model needs to give a loss: its labels, or a head."""
    labels = [name for name in signature(model.forward).parameters if name.endswith(("labels", "label", "_positions"))]
    if labels:
        return f"give its labels too, under the names that its forward has for them: {', '.join(labels)}"
    import transformers

    from vpipe.models.huggingface.architectures import usual

    such = usual(transformers, model.config)
    return f"it has no head: take a class for the task{f', such as {such}' if such else ''} (config: architectures)"


@dataclass(frozen=True)
class ModelTask:
    """``causal`` (the next token), ``masked`` (hidden tokens), ``pretraining`` (BERT's two losses), ``translation``
    (encoder and decoder), ``own``: the model's own arguments by their names, labels included, and its own loss; or
    ``plain``: its own arguments, and whatever it returns."""

    kind: str
    padding: int = 0
    """The token that fills up; translation hides it."""
    names: tuple[str, ...] = ()
    """Arguments of ``own``."""
    constants: tuple[tuple[str, Any], ...] = ()
    """Further arguments of ``own`` that are no tensors."""
    with_cache: bool = False
    """Whether the forward has ``use_cache``, which is switched off: it copies keys and values."""

    def arguments(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Our inputs as the arguments of the model's forward."""
        cache = {"use_cache": False} if self.with_cache else {}
        if self.kind == "causal":
            return {"input_ids": inputs["tokens"], **cache}
        if self.kind == "masked":
            return {"input_ids": inputs["tokens"], "attention_mask": inputs["mask"], **cache}
        if self.kind == "pretraining":
            segments = inputs["segments"]
            return {
                "input_ids": inputs["tokens"],
                "attention_mask": inputs["mask"],
                "token_type_ids": segments.long(),
                **cache,
            }
        if self.kind == "translation":
            source = inputs["source"]
            return {
                "input_ids": source,
                "attention_mask": source != self.padding,
                "decoder_input_ids": inputs["target_in"],
                **cache,
            }
        return {**inputs, **dict(self.constants), **cache}

    def output(self, model: Any, made: Any) -> Any:
        """What of the model's result the loss needs; where experts are balanced, also the loss for that."""
        if self.kind == "pretraining":
            return made.prediction_logits, made.seq_relationship_logits
        if self.kind == "plain":
            return made
        if self.kind == "own":
            if getattr(made, "loss", None) is None:
                raise UserError(f"{type(model).__name__} gives no loss for {', '.join(self.names)}; {_remedy(model)}")
            return made.loss
        extra = getattr(made, "aux_loss", None)
        if extra is None:
            return made.logits
        return made.logits, model.config.get_text_config().router_aux_loss_coef * extra

    def loss(self, ignored: int | None) -> Any:
        """It says what counts, too."""
        if self.kind == "own":
            return OwnLoss()
        if self.kind in ("pretraining", "masked"):
            return (PretrainingLoss if self.kind == "pretraining" else MaskedLoss)(-1 if ignored is None else ignored)
        return TokenLoss((self.padding if self.kind == "translation" else IGNORED) if ignored is None else ignored)

    def example(self, config: Any, rows: int, length: int, seed: int) -> dict[str, Tensor]:
        """Inputs of these sizes with random values, for finding out how the model works."""
        generator = torch.Generator().manual_seed(seed)
        vocabulary = config.get_text_config().vocab_size if self.kind != "own" else 2

        def tokens(width: int) -> Tensor:
            drawn = torch.randint(0, vocabulary, (rows, width), generator=generator)
            return drawn.where(drawn != self.padding, (drawn + 1) % vocabulary)

        def mask() -> Tensor:
            made = torch.ones(rows, length, dtype=torch.long)
            made[seed % rows, length - 1 - seed % 2 :] = 0
            return made

        if self.kind == "causal":
            return {"tokens": tokens(length)}
        if self.kind == "masked":
            return {"tokens": tokens(length), "mask": mask()}
        if self.kind == "pretraining":
            segments = torch.randint(0, 2, (rows, length), generator=generator)
            return {"tokens": tokens(length), "segments": segments, "mask": mask()}
        source = tokens(length)
        return {"source": source.where(mask() > 0, self.padding), "target_in": tokens(length - 2)}
