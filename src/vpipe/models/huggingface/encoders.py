"""Models with an encoder: BERT for pre-training, BART and Marian, T5.

Padding enters as a mask of 1 and 0, which every attention turns into its own form with the library's function. What
one layer makes and all later ones need, the encoder's memory and T5's position bias, is a named value: it goes from
its writer to each reader."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.models.huggingface.decoders import causal_mask, positions_of
from vpipe.models.huggingface.pieces import Part, Piece


def padding_mask(config: Any, x: Tensor, mask: Tensor, memory: Tensor | None = None) -> Any:
    """The library's own mask of padding, from ``x`` to itself or to ``memory``; ``None`` where nothing is hidden."""
    from transformers.masking_utils import create_bidirectional_mask

    return create_bidirectional_mask(config=config, inputs_embeds=x, attention_mask=mask, encoder_hidden_states=memory)


class BertEmbedding(Part):
    embeddings: nn.Module

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        x: Tensor = self.embeddings(input_ids=tokens, token_type_ids=segments.long())
        return x


class BertLayer(Part):
    block: nn.Module

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.block(x, padding_mask(self.config, x, mask))
        return y


class BertHeads(Part):
    pooler: nn.Module
    cls: nn.Module

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens, sentence = self.cls(x, self.pooler(x))
        return tokens, sentence


def bert(root: nn.Module) -> list[Piece]:
    config: Any = root.config
    return [
        Piece(BertEmbedding, {"embeddings": "bert.embeddings"}, "embeddings", reads=("tokens", "segments")),
        *(
            Piece(
                BertLayer, {"block": f"bert.encoder.layer.{index}"}, f"layer {index}", ("x", "mask"), cost_key="layer"
            )
            for index in range(config.num_hidden_layers)
        ),
        Piece(BertHeads, {"pooler": "bert.pooler", "cls": "cls"}, "heads"),
    ]


class BartEmbedding(Part):
    """Tokens and positions; of the source also its mask."""

    embed_tokens: nn.Module
    embed_positions: nn.Module

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.embed_tokens(tokens)
        if self.config.model_type == "bart":
            x = x + self.embed_positions(tokens, 0, position_ids=positions_of(tokens)[0])
            x = self.get_submodule("layernorm_embedding")(x)
        else:
            x = x + self.embed_positions(tokens.shape, 0)
        x = nn.functional.dropout(x, p=self.config.dropout, training=self.training)
        return (x, tokens != self.config.pad_token_id) if self.options["with_mask"] else x


class BartEncoderLayer(Part):
    block: nn.Module

    def forward(self, x: Tensor, source_mask: Tensor) -> Tensor:
        y: Tensor = self.block(x, padding_mask(self.config, x, source_mask))
        return y


class BartDecoderLayer(Part):
    block: nn.Module

    def forward(self, y: Tensor, memory: Tensor, source_mask: Tensor) -> Tensor:
        cross = padding_mask(self.config, y, source_mask, memory)
        z: Tensor = self.block(y, causal_mask(self.config, y), memory, encoder_attention_mask=cross, use_cache=False)
        return z


class BartHead(Part):
    lm_head: nn.Module
    final_logits_bias: Tensor

    def forward(self, y: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(y) + self.final_logits_bias
        return logits


def bart(root: nn.Module) -> list[Piece]:
    """BART and Marian. The last encoder layer writes ``memory``."""
    config: Any = root.config
    if config.encoder_layerdrop or config.decoder_layerdrop:
        raise UserError(
            f"the {config.model_type} config has encoder_layerdrop {config.encoder_layerdrop} and decoder_layerdrop "
            f"{config.decoder_layerdrop}, which drop whole layers at random; a pipeline cannot, so set both to 0"
        )
    kinds = ["embed_tokens", "embed_positions", *(["layernorm_embedding"] if config.model_type == "bart" else [])]

    def embedding(side: str, reads: str, writes: tuple[str, ...]) -> Piece:
        modules = {kind: f"model.{side}.{kind}" for kind in kinds}
        options = {"with_mask": side == "encoder"}
        return Piece(BartEmbedding, modules, f"{side} embedding", (reads,), writes, options=options)

    return [
        embedding("encoder", "source", ("x", "source_mask")),
        *(
            Piece(
                BartEncoderLayer,
                {"block": f"model.encoder.layers.{index}"},
                f"encoder {index}",
                ("x", "source_mask"),
                ("memory",) if index == config.encoder_layers - 1 else ("x",),
                "encoder",
            )
            for index in range(config.encoder_layers)
        ),
        embedding("decoder", "target_in", ("y",)),
        *(
            Piece(
                BartDecoderLayer,
                {"block": f"model.decoder.layers.{index}"},
                f"decoder {index}",
                ("y", "memory", "source_mask"),
                ("y",),
                "decoder",
            )
            for index in range(config.decoder_layers)
        ),
        Piece(
            BartHead, {"lm_head": "lm_head"}, "head", ("y",), ("y",), buffers={"final_logits_bias": "final_logits_bias"}
        ),
    ]


class T5Embedding(Part):
    embed_tokens: nn.Module
    dropout: nn.Module

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x: Tensor = self.dropout(self.embed_tokens(tokens))
        return x if self.config.is_decoder else (x, tokens != self.config.pad_token_id)


class T5Encoder(Part):
    """The first block makes the position bias, the others take it; the last one is followed by the final norm."""

    block: nn.Module

    def forward(self, x: Tensor, source_mask: Tensor, bias: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        y, made, _ = self.block(x, padding_mask(self.config, x, source_mask), bias)
        if self.options["last"]:
            y = self.get_submodule("dropout")(self.get_submodule("norm")(y))
        return (y, made) if bias is None else y


class T5Decoder(Part):
    block: nn.Module

    def forward(
        self, y: Tensor, memory: Tensor, source_mask: Tensor, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        cross = padding_mask(self.config, y, source_mask, memory)
        z, made, _ = self.block(y, causal_mask(self.config, y), bias, memory, cross, None)
        return (z, made) if bias is None else z


class T5Head(Part):
    norm: nn.Module
    dropout: nn.Module
    lm_head: nn.Module

    def forward(self, y: Tensor) -> Tensor:
        z = self.dropout(self.norm(y))
        if self.config.scale_decoder_outputs:
            z = z * (self.config.d_model**-0.5)
        logits: Tensor = self.lm_head(z)
        return logits


def t5(root: nn.Module) -> list[Piece]:
    """T5. Each side's first block writes a position bias that the side's other blocks read."""
    config: Any = root.config

    def embedding(side: str, reads: str, writes: tuple[str, ...]) -> Piece:
        modules = {"embed_tokens": f"{side}.embed_tokens", "dropout": f"{side}.dropout"}
        return Piece(T5Embedding, modules, f"{side} embedding", (reads,), writes, owner=side)

    def block(side: str, index: int, last: bool) -> Piece:
        modules = {"block": f"{side}.block.{index}"}
        flow, bias = ("x", "encoder_bias") if side == "encoder" else ("y", "decoder_bias")
        reads = (flow, "source_mask") if side == "encoder" else (flow, "memory", "source_mask")
        writes = flow
        if side == "encoder" and last:
            modules |= {"norm": "encoder.final_layer_norm", "dropout": "encoder.dropout"}
            writes = "memory"
        return Piece(
            T5Encoder if side == "encoder" else T5Decoder,
            modules,
            f"{side} {index}",
            reads if index == 0 else (*reads, bias),
            (writes, bias) if index == 0 else (writes,),
            side,
            owner=side,
            options={"last": last},
        )

    head = {"norm": "decoder.final_layer_norm", "dropout": "decoder.dropout", "lm_head": "lm_head"}
    return [
        embedding("encoder", "source", ("x", "source_mask")),
        *(block("encoder", index, index == config.num_layers - 1) for index in range(config.num_layers)),
        embedding("decoder", "target_in", ("y",)),
        *(block("decoder", index, False) for index in range(config.num_decoder_layers)),
        Piece(T5Head, head, "head", ("y",), ("y",)),
    ]
