"""What every model hands over: a list of layer factories, a loss, and the few numbers that planning and metrics need;
and how a built-in one is made from the ``model`` section of a config (``build``).

Three promises keep a model independent of how it is cut. A layer is a *factory*, so that only the rank that owns it
pays for it. A layer's initial weights depend on ``(seed, layer index)`` alone, so that the partition does not change
them. Weights that are tied start equal on every rank without a message, because each owner can build the first owner's
value by itself.

Targets are already shifted: the target of a position is what the model should say there. A unit's loss is the mean over
its valid targets; ``count`` says how many there are, so that units of unequal length weigh what they should.

A builder is a plain function with keyword arguments; its signature is the list of options it takes. That keeps one
statement of what a model accepts: an option that no builder reads cannot exist, and a misspelt one is an error that
names the nearest.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vpipe.errors import UserError
from vpipe.layer import Layer, TiedWeight, bind_inputs, input_names
from vpipe.registry import MODEL_REGISTRY, check_options

if TYPE_CHECKING:
    from vpipe.config import ModelConfig

Factory = Callable[[], nn.Module]
LABELS = "labels"
"""The input that a split head reads."""

_random_state = RLock()
"""The CPU generator is one per process; ranks that are threads build one after the other."""


@dataclass(frozen=True)
class Model:
    """A model as the rest of vpipe sees it."""

    layers: list[Layer]
    loss: Callable[[Any, Any], Tensor]
    """``loss(output, targets)``: a scalar, the mean over the valid targets; zero where none is valid."""
    counts: Callable[[Any], int] | None = None
    """``count(targets)``, where the loss has no ``count`` of its own."""
    tied: tuple[TiedWeight, ...] = ()
    sequence_length: int = 0
    vocab_size: int = 0
    hidden_size: int = 0
    num_layers: int = 0
    """As the model counts them."""
    attention_flops: float = 0.0
    """FLOPs per token, forward and backward, of the products that have no weight (scores and weighted sums)."""
    experts_per_token: int = 0
    """How many of a layer's experts, the first dimension of a weight of three, a token meets."""
    pair_flops: tuple[float, float] = (0.0, 0.0)
    """The same as ``attention_flops`` by lengths, of an encoder and a decoder: FLOPs for each pair of tokens of the
    source, and for each of the target with one of either side."""
    num_shards: int = 0
    """Layers that share the head, before the one that joins them; see ``split_head``."""

    def given(self, inputs: Any, targets: Any) -> Any:
        """What the model takes of a batch; one whose head is split takes the labels too."""
        if not self.num_shards:
            return inputs
        return bind_inputs([name for name in self.inputs if name != LABELS], inputs) | {LABELS: targets}

    def count(self, targets: Any) -> int:
        """How many targets are valid: the only answer to what a unit weighs among others."""
        counts = self.counts or getattr(self.loss, "count", None)
        if counts is None:
            raise UserError(f"nothing says which targets of {self.loss!r} count; give Model(..., counts=...)")
        return int(counts(targets))

    @property
    def count_apart(self) -> Callable[[Any], int] | None:
        """The same of a second part of the loss, which is a mean of its own."""
        return getattr(self.loss, "count_apart", None)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the values that the model takes from outside."""
        return input_names(self.layers)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied ones once; nothing is allocated to know it."""
        return Skeleton.of("", self).num_parameters

    @property
    def flops_per_token(self) -> float:
        """Forward and backward of one token: 6 per weight of a matrix product (2 forward, 4 backward) and the
        attention's own.

        Attention is counted in full, as the usual definition of MFU does, although a causal mask needs only half of it.
        """
        return Skeleton.of("", self).flops_per_token

    def build(self) -> list[nn.Module]:
        """All layers, built here: for one process, tests and counting."""
        return [layer.build() for layer in self.layers]

    def blank(self) -> list[nn.Module]:
        """All layers without storage: names and shapes."""
        with torch.device("meta"), _WithoutNormal():
            return self.build()


@dataclass(frozen=True)
class Skeleton:
    """Names, shapes and sizes of all layers; nothing is allocated."""

    name: str
    modules: list[nn.Module]
    layer_names: list[str]
    parameters: list[int]
    """Per layer, its parameters."""
    weight_bytes: list[int]
    work: list[float]
    """Per layer, about how much it computes: the weights of its matrix products; an embedding has none."""
    num_parameters: int = 0
    """Of the whole model, tied ones once."""
    flops_per_token: float = 0.0
    """See ``Model.flops_per_token``."""
    num_shards: int = 0
    """See ``Model.num_shards``."""
    side_flops: tuple[float, ...] = ()
    """Of an encoder and a decoder: FLOPs of a token of the source, of the target; then ``Model.pair_flops``."""

    def flops(self, inputs: Any, num_tokens: int, pad_id: int | None) -> float:
        """Forward and backward of inputs with so many tokens; of pairs by the lengths that they have."""
        if not self.side_flops:
            return num_tokens * self.flops_per_token
        source, target = ((inputs[name] != pad_id).sum(1).double() for name in ("source", "target_in"))
        amounts = (source, target, source * source, target * (source + target))
        return sum(flops * float(amount.sum()) for flops, amount in zip(self.side_flops, amounts, strict=True))

    @classmethod
    def of(cls, name: str, model: Model) -> Skeleton:
        modules = model.blank()
        names = [layer.name or type(module).__name__ for layer, module in zip(model.layers, modules, strict=True)]
        parameters = [sum(p.numel() for p in module.parameters()) for module in modules]
        weight_bytes = [sum(p.numel() * p.element_size() for p in module.parameters()) for module in modules]
        products = [_met(model, module) for module in modules]
        smallest = max(products, default=0) * 0.01 or 1.0
        work = [amount + smallest for amount in products]
        in_all, multiplied = sum(parameters), sum(products)
        for weight in model.tied:
            in_all -= sum(modules[layer].get_parameter(name).numel() for layer, name in weight.owners[1:])
        flops = 6.0 * multiplied + model.attention_flops
        sides: tuple[float, ...] = ()
        if any(model.pair_flops):
            of_source = _of_source(model, modules, products)
            sides = (6.0 * of_source, 6.0 * (multiplied - of_source), *model.pair_flops)
        return cls(name, modules, names, parameters, weight_bytes, work, in_all, flops, model.num_shards, sides)

    @cached_property
    def fingerprint(self) -> str:
        """What a checkpoint must share with the run that reads it: layers and shapes, not how they are spread."""
        shapes = [
            (layer, name, tuple(p.shape))
            for layer, module in enumerate(self.modules)
            for name, p in module.named_parameters()
        ]
        digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:8]
        return f"{self.name} of {len(self.modules)} layers and {sum(self.parameters):,} weights, {digest}"


def _met(model: Model, module: nn.Module) -> float:
    """The weights of matrix products that a token meets: of experts those that it is given to; embeddings are looked
    up."""
    parts = (part for part in module.modules() if not isinstance(part, nn.Embedding))
    weights = [p for part in parts for p in part.parameters(recurse=False)]
    experts = [p.numel() * min(1.0, model.experts_per_token / p.shape[0]) for p in weights if p.ndim == 3]
    return sum(experts) + sum(p.numel() for p in weights if p.ndim == 2)


def _of_source(model: Model, modules: Sequence[nn.Module], products: Sequence[float]) -> float:
    """Those that a token of the source meets: of the encoder's layers, by their names, and what makes keys and values
    of the memory."""
    found = 0.0
    for layer, module, weights in zip(model.layers, modules, products, strict=True):
        named = [p.numel() for name, p in module.named_parameters() if p.ndim == 2 and _OF_MEMORY.search(name)]
        found += weights if "encoder" in layer.name and "decoder" not in layer.name else sum(named)
    return found


_OF_MEMORY = re.compile(r"(cross_attention|EncDecAttention|encoder_attn)\.[kv]")
"""In the names of ours, of T5 and its kin, of BART and its kin."""


@dataclass(frozen=True)
class Seeded:
    """A factory whose random numbers come from ``seed`` and leave no trace in the process' own generator."""

    factory: Factory
    seed: int

    def __call__(self) -> nn.Module:
        if building_on_meta():
            return self.factory()
        generator = torch.default_generator
        with _random_state, torch.device("cpu"):  # an accelerator's generator would give other weights
            before = generator.get_state()
            generator.manual_seed(self.seed)
            try:
                return self.factory()
            finally:
                generator.set_state(before)


def seeded(factory: Factory, seed: int, index: int) -> Factory:
    """``factory`` with the random numbers of layer ``index`` of a model with this ``seed``."""
    return Seeded(factory, derived_seed(seed, index))


def seed_layers(layers: Sequence[Layer], seed: int) -> list[Layer]:
    """The layers, each with the random numbers of its place in the list."""
    return [replace(layer, module=seeded(layer.build, seed, index)) for index, layer in enumerate(layers)]


def derived_seed(*numbers: int) -> int:
    """A seed of 63 bits that depends on all ``numbers``; neighbours give unrelated streams."""
    digest = hashlib.sha256(":".join(str(number) for number in numbers).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class _WithoutNormal(TorchFunctionMode):
    """Leaves out normal numbers where there is no storage for them: the first ``normal_`` loads 1.4 s of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NORMAL:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


_NORMAL = (Tensor.normal_, nn.init.normal_)
"""torch asks a mode for the second before that calls the first."""


def building_on_meta() -> bool:
    """Whether modules are being built without storage, only to be counted."""
    return torch.get_default_device().type == "meta"


@dataclass(frozen=True)
class Tied:
    """A factory whose parameters start with the values of the parameters they are tied to."""

    factory: Factory
    sources: tuple[tuple[str, Factory, str], ...]
    """(own parameter, factory of the first owner, its parameter) each."""

    def __call__(self) -> nn.Module:
        module = self.factory()
        if not building_on_meta():
            for name, source, source_name in self.sources:
                with torch.no_grad():
                    module.get_parameter(name).copy_(source().get_parameter(source_name))
        return module


def tie(layers: Sequence[Layer], tied: Sequence[TiedWeight]) -> list[Layer]:
    """The layers, with every tied parameter starting at the value of its first owner, on every rank."""
    sources: dict[int, list[tuple[str, Factory, str]]] = {}
    for weight in tied:
        first, first_name = weight.owners[0]
        for layer, name in weight.owners[1:]:
            sources.setdefault(layer, []).append((name, layers[first].build, first_name))
    return [
        replace(layer, module=Tied(layer.build, tuple(sources[index]))) if index in sources else layer
        for index, layer in enumerate(layers)
    ]


def run(layers: Sequence[Layer], modules: Sequence[nn.Module], inputs: Any) -> Any:
    """The model in one process: the meaning that every pipeline must reproduce.

    ``inputs`` is a mapping from input names to values, or the value itself where the model has one input.
    """
    names = input_names(layers)
    if not (isinstance(inputs, Mapping) and set(names) <= set(inputs)):
        if len(names) != 1:
            raise UserError(f"the model reads {', '.join(names)}; give a mapping with these names as input")
        inputs = {names[0]: inputs}
    values = dict(inputs)
    output: Any = None
    for layer, module in zip(layers, modules, strict=True):
        output = module(*(values[name] for name in layer.reads))
        values.update({layer.writes[0]: output} if len(layer.writes) == 1 else zip(layer.writes, output, strict=True))
    return output


def positive(**sizes: int) -> None:
    """Every size is at least 1."""
    for name, size in sizes.items():
        if size < 1:
            remedy = "; give it, or take it from the data set" if name == "vocab_size" else ""
            raise UserError(f"model.{name} is {size} but must be at least 1{remedy}")


def head_size_of(hidden_size: int, num_heads: int) -> int:
    """The size of a head that divides ``hidden_size`` evenly."""
    positive(num_heads=num_heads)
    if hidden_size % num_heads:
        fitting = [heads for heads in range(1, hidden_size + 1) if hidden_size % heads == 0]
        near = min(fitting, key=lambda heads: abs(heads - num_heads))
        raise UserError(
            f"model.hidden_size {hidden_size} is not divisible by model.num_heads {num_heads}; {near} heads would fit"
        )
    return hidden_size // num_heads


def fits(length: int, sequence_length: int) -> None:
    """A sequence is not longer than the learned positions."""
    if length > sequence_length:
        raise UserError(
            f"a sequence has {length} tokens but model.sequence_length is {sequence_length}; raise it or cut the data"
        )


def model_options(section: ModelConfig, known: Collection[str]) -> dict[str, Any]:
    """The options of a config for a builder that takes ``known``: a size it does not have is left out, unless it
    was set. What is set but not known stays in, so that the builder can refuse it by name."""
    fields = {
        name: value
        for name, value in section
        if name not in ("name", "compile", "split_head", "extra") and value is not None
    }
    default = {name: field.default for name, field in type(section).model_fields.items()}
    return {key: value for key, value in fields.items() if key in known or value != default[key]} | section.extra


def build(
    name: str, section: Mapping[str, Any] | None = None, *, vocab_size: int | None = None, seed: int = 0
) -> Model:
    """The model ``name``, ours or a registered function's, with the options of ``section`` (``extra`` is folded in;
    ``name`` is left out).

    ``vocab_size`` is the data set's, taken where the section has none or −1. Where a function has no ``seed``, its
    layers are seeded here, so that every rank starts with the same weights.
    """
    make = MODEL_REGISTRY.get(name)
    known = inspect.signature(make).parameters
    options = {key: value for key, value in (section or {}).items() if key not in ("name", "extra")}
    options.update((section or {}).get("extra") or {})
    if options.get("vocab_size", -1) == -1:
        options.pop("vocab_size", None)
        if vocab_size is not None and "vocab_size" in known:
            options["vocab_size"] = vocab_size
    check_options(name, make, options, "model", [*known])
    missing = [key for key, option in known.items() if option.default is option.empty and key not in options]
    missing = [key for key in missing if key != "seed"]
    if missing:
        raise UserError(f"model.{missing[0]} is missing and {name!r} needs it; give it, or a data set that knows it")
    made = make(**({"seed": seed} | options if "seed" in known else options))
    if not isinstance(made, Model):
        raise UserError(f"the model {name!r} must be a ModelInterface or a function that gives a Model, not {made!r}")
    if "num_layers" in known:
        made = replace(made, num_layers=options.get("num_layers", known["num_layers"].default))
    return made if "seed" in known else replace(made, layers=tie(seed_layers(made.layers, seed), made.tied))
