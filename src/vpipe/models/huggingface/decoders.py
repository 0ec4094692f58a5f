"""Causal language models: GPT-2, and the LLaMA family, whose members differ in details that live inside their own
blocks.

Masks and rotary angles depend on positions only. Each block makes its own, which is cheaper than sending them: with
torch's fused attention the causal mask is a flag."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vpipe.models.huggingface.pieces import Part, Piece


def positions_of(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device).unsqueeze(0)


def causal_mask(config: Any, x: Tensor, sliding: bool = False) -> Any:
    """The library's own causal mask; ``None`` where its attention needs none."""
    from transformers import masking_utils

    make = masking_utils.create_sliding_window_causal_mask if sliding else masking_utils.create_causal_mask
    return make(config=config, inputs_embeds=x, attention_mask=None, past_key_values=None)


class GPT2Embedding(Part):
    wte: nn.Module
    wpe: nn.Module
    drop: nn.Module

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        y: Tensor = self.drop(x + self.wpe(positions_of(x)))
        return y


class GPT2Block(Part):
    block: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x, None, causal_mask(self.config, x), use_cache=False)
        return y


class Embedding(Part):
    embed_tokens: nn.Module

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(tokens)
        return x


class RotaryBlock(Part):
    block: nn.Module
    rotary_emb: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        positions = positions_of(x)
        y: Tensor = self.block(
            x,
            attention_mask=causal_mask(self.config, x, self.options["sliding"]),
            position_ids=positions,
            position_embeddings=self.rotary_emb(x, position_ids=positions),
            use_cache=False,
        )
        return y


class Head(Part):
    norm: nn.Module
    lm_head: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def gpt2(root: nn.Module) -> list[Piece]:
    config: Any = root.config
    embedding = {"wte": "transformer.wte", "wpe": "transformer.wpe", "drop": "transformer.drop"}
    return [
        Piece(GPT2Embedding, embedding, "embedding", reads=("tokens",)),
        *(
            Piece(GPT2Block, {"block": f"transformer.h.{index}"}, f"block {index}", cost_key="block")
            for index in range(config.num_hidden_layers)
        ),
        Piece(Head, {"norm": "transformer.ln_f", "lm_head": "lm_head"}, "head"),
    ]


def llama_family(root: nn.Module) -> list[Piece]:
    config: Any = root.config
    pieces = [Piece(Embedding, {"embed_tokens": "model.embed_tokens"}, "embedding", reads=("tokens",))]
    for index in range(config.num_hidden_layers):
        sliding = slides(config, index)
        pieces.append(
            Piece(
                RotaryBlock,
                {"block": f"model.layers.{index}", "rotary_emb": "model.rotary_emb"},
                f"block {index}",
                cost_key="sliding block" if sliding else "block",
                options={"sliding": sliding},
            )
        )
    return [*pieces, Piece(Head, {"norm": "model.norm", "lm_head": "lm_head"}, "head")]


def slides(config: Any, index: int) -> bool:
    """Whether block ``index`` looks back over a window only."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return bool(kinds[index] == "sliding_attention")
    return config.model_type in ("mistral", "phi3") and config.sliding_window is not None
