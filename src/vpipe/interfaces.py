"""OurGPipe's three interfaces, and how what implements them becomes what the rest of vpipe reads.

    @MODEL_REGISTRY.register("tiny")
    class Tiny(ModelInterface):
        def get_model_config(self):
            return {"embed": {"size": 8}, "block": {"size": 8}, "head": {"size": 8}}
        def create_layer(self, layer_type, params):
            return ...

A model needs the two methods above. Its loss is cross entropy, unless a ``StageInterface`` of the same name is
registered. A data set needs ``load_dataset`` and ``process_batch``. All else has a default that can be overridden.

Nothing here imports torch until a model or a batch is made.
"""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vpipe.errors import UserError
from vpipe.registry import DATASET_REGISTRY, MODEL_REGISTRY, STAGE_REGISTRY

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vpipe.config import DatasetConfig, ModelConfig
    from vpipe.data.dataset import Batch, DataSet
    from vpipe.models.model import Model

IGNORED = -100
"""The label of a position that does not count, as in torch's cross entropy."""


SIZES = {"hidden_size": 512, "num_layers": 16, "num_heads": 16}
"""OurGPipe's, for a model of the user's where the config has none."""


class ModelInterface(ABC):
    """A model by the names and parameters of its layers; ``config`` is the section ``model``."""

    def __init__(self, config: ModelConfig) -> None:
        missing = {name: size for name, size in SIZES.items() if getattr(config, name) is None}
        self.config = config.model_copy(update=missing)

    @abstractmethod
    def get_model_config(self) -> dict[str, dict[str, Any]]:
        """Layer name → parameters of its constructor, in the order of the layers."""

    @abstractmethod
    def create_layer(self, layer_type: str, params: dict[str, Any]) -> nn.Module:
        """The layer that ``get_model_config`` calls ``layer_type``. It takes what the layer before it returned."""

    def get_stage_partition(self, num_stages: int) -> list[list[int]]:
        """The layer numbers of each stage, in order; by default as even as possible, the earlier stages first."""
        share, left = divmod(len(self.get_model_config()), num_stages)
        ends = [stage * share + min(stage, left) for stage in range(num_stages + 1)]
        return [list(range(start, end)) for start, end in pairwise(ends)]

    def get_hidden_size(self) -> int:
        return self.config.hidden_size or SIZES["hidden_size"]

    def get_sequence_length(self) -> int:
        return self.config.sequence_length

    def get_vocab_size(self) -> int:
        return self.config.vocab_size

    def get_flops_per_token(self) -> float:
        """Forward and backward of one token, for MFU; by default six per weight of a matrix product."""
        return adapt_model(self).flops_per_token


class StageInterface:
    """What happens at the ends of a pipeline. Every method has a default: writing a stage is rarely needed."""

    ignored: int = IGNORED

    def prepare_input(self, x: Any, mb: int | None = None) -> Any:
        """What the first layer gets instead of ``x``. ``mb`` is ``None``: a result must not depend on the unit."""
        return x

    def compute_loss(self, output: Any, labels: Any) -> Tensor:
        """A scalar: by default the mean cross entropy of ``output (..., classes)`` with ``labels (...)``."""
        from vpipe.models.losses import masked_cross_entropy

        return masked_cross_entropy(output, labels, self.ignored)

    def count_targets(self, labels: Any) -> int:
        """How many labels count: the weight of a unit's loss among the others."""
        return int((labels != self.ignored).sum())

    def create_sub_model(
        self, model: ModelInterface, model_config: dict[str, dict[str, Any]], layer_indices: Sequence[int]
    ) -> nn.Module:
        """The layers of those numbers as one module. A pipeline asks for them one by one."""
        from torch import nn

        names = list(model_config)
        layers = [model.create_layer(names[index], model_config[names[index]]) for index in layer_indices]
        return layers[0] if len(layers) == 1 else nn.Sequential(*layers)


class DatasetInterface(ABC):
    """A data set by its raw examples; ``config`` is the section ``dataset``."""

    def __init__(self, config: DatasetConfig, sequence_length: int) -> None:
        self.config = config
        self.sequence_length = sequence_length

    @abstractmethod
    def load_dataset(self) -> Any:
        """All raw examples: anything with a length and numbered items; or an iterable, whose examples come in its own
        order, again and again, as long as training.max_iterations says."""

    @abstractmethod
    def process_batch(self, batch: Any) -> Mapping[str, Any]:
        """``{"inputs": ..., "labels": ...}`` of what the collate function made, as tensors with the example first.

        ``labels`` are already shifted: the label of a position is what the model should say there.
        """

    def get_tokenizer(self) -> Any:
        """The tokenizer, if there is one."""
        return None

    def get_vocab_size(self) -> int:
        """Token ids are below this; by default the size of the tokenizer."""
        tokenizer = self.get_tokenizer()
        if hasattr(tokenizer, "get_vocab_size"):
            return int(tokenizer.get_vocab_size())
        if hasattr(tokenizer, "__len__"):
            return len(tokenizer)
        raise UserError(f"{type(self).__name__} has no tokenizer with a size: write its get_vocab_size()")

    def get_collate_fn(self) -> Callable[[list[Any]], Any] | None:
        """Makes what ``process_batch`` gets from a list of raw examples; ``None`` gives the list itself."""
        return None

    def get_train_test_split(self, test_size: float = 0.1, seed: int = 1024) -> tuple[Any, Sequence[Any]]:
        """Training and held-out examples, drawn by ``seed``; of an iterable nothing is held out."""
        examples = self.load_dataset()
        if not _is_numbered(examples):
            return examples, ()
        numbers = list(range(len(examples)))
        random.Random(seed).shuffle(numbers)
        held_out = round(len(numbers) * test_size)
        return _Part(examples, sorted(numbers[held_out:])), _Part(examples, sorted(numbers[:held_out]))


@dataclass(frozen=True)
class _Part(Sequence[Any]):
    """Some items of a sequence."""

    whole: Sequence[Any]
    numbers: list[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return _Part(self.whole, self.numbers[index]) if isinstance(index, slice) else self.whole[self.numbers[index]]


def _is_numbered(examples: Any) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(examples, Sized) and not isinstance(examples, IterableDataset)


class _Stream(Sequence[Any]):
    """The examples of an iterable, by numbers that rise from iteration to iteration (``rows``); it begins anew after
    its end, and where an earlier one is asked for."""

    def __init__(self, opened: Callable[[], Iterable[Any]], seed: int, rows: int) -> None:
        self._opened, self._seed, self._rows = opened, seed, rows
        self._begin()

    def __len__(self) -> int:
        from vpipe.data.order import ENDLESS

        return ENDLESS

    def __getitem__(self, index: Any) -> Any:
        if index < self._next and index not in self._kept:
            self._begin()
        while self._next <= index:
            self._kept[self._next] = self._following()
            self._kept.pop(self._next - self._rows, None)
            self._next += 1
        return self._kept[index]

    def _begin(self) -> None:
        self._next, self._kept = 0, dict[int, Any]()
        self._examples = iter(self._opened())

    def _following(self) -> Any:
        from vpipe.data.dataset import seeded

        with seeded(self._seed, self._next):  # the same numbers, whether a run has come here or goes on from here
            for _ in range(2):
                for example in self._examples:
                    return example
                self._examples = iter(self._opened())
        raise UserError("the data set is an iterable without any example; give it some")


@dataclass(frozen=True)
class _LayerFactory:
    """Builds one layer where it is needed; an object, not a closure, so that it can travel to another process."""

    model: ModelInterface
    stage: StageInterface
    index: int

    def __call__(self) -> nn.Module:
        from torch import nn

        made: object = self.stage.create_sub_model(self.model, self.model.get_model_config(), [self.index])
        if not isinstance(made, nn.Module):
            name = list(self.model.get_model_config())[self.index]
            raise UserError(
                f"{type(self.model).__name__}.create_layer({name!r}) gave {made!r} instead of a torch module"
            )
        if self.index == 0 and type(self.stage).prepare_input is not StageInterface.prepare_input:
            made.register_forward_pre_hook(lambda _, inputs: (self.stage.prepare_input(inputs[0], None), *inputs[1:]))
        return made


def adapt_model(model: ModelInterface, stage: StageInterface | None = None, seed: int = 0) -> Model:
    """A ``ModelInterface`` as the list of layers and the loss that the rest of vpipe reads."""
    from vpipe.layer import Layer
    from vpipe.models.model import Model, seed_layers

    stage = StageInterface() if stage is None else stage
    names = list(model.get_model_config())
    if not names:
        raise UserError(f"{type(model).__name__}.get_model_config() names no layers")
    layers = [Layer(_LayerFactory(model, stage, index), name=name) for index, name in enumerate(names)]
    made = Model(
        layers=seed_layers(layers, seed),
        loss=stage.compute_loss,
        counts=stage.count_targets,
        sequence_length=model.get_sequence_length(),
        vocab_size=model.get_vocab_size(),
        hidden_size=model.get_hidden_size(),
    )
    if type(model).get_flops_per_token is ModelInterface.get_flops_per_token:
        return made
    return replace(made, attention_flops=model.get_flops_per_token() - made.flops_per_token)


def stage_sizes(model: ModelInterface, num_stages: int) -> list[int]:
    """``get_stage_partition`` as layers per stage, checked: the stages are consecutive and hold every layer once."""
    partition = model.get_stage_partition(num_stages)
    num_layers = len(model.get_model_config())
    if len(partition) != num_stages or [i for stage in partition for i in stage] != list(range(num_layers)):
        raise UserError(
            f"{type(model).__name__}.get_stage_partition({num_stages}) gave {partition}, but {num_stages} stages must "
            f"hold the layers 0 to {num_layers - 1}, each once and in order"
        )
    return [len(stage) for stage in partition]


def registered_model(config: ModelConfig, vocab_size: int | None = None, seed: int = 0) -> Model:
    """The model that ``config.name`` has in ``MODEL_REGISTRY``: ours, a ``ModelInterface``, or a function that gives a
    Model.

    ``vocab_size`` is the data set's, taken where the config has −1.
    """
    from vpipe.models.model import build, model_options

    found = MODEL_REGISTRY.get(config.name)
    if isinstance(found, type) and issubclass(found, ModelInterface):
        if config.vocab_size == -1 and vocab_size is not None:
            config = config.model_copy(update={"vocab_size": vocab_size})
        stage = STAGE_REGISTRY.create(config.name) if config.name in STAGE_REGISTRY else None
        return adapt_model(found(config), stage, seed)
    known = inspect.signature(found).parameters
    return build(config.name, model_options(config, known), vocab_size=vocab_size, seed=seed)


def adapt_dataset(interface: DatasetInterface, test_size: float = 0.1, seed: int = 1024, rows: int = 0) -> DataSet:
    """A ``DatasetInterface`` as the data set that training reads; its ``valid`` is the held-out part. ``rows`` is how
    many examples an iteration reads, which an iterable must know; 0 where nothing says when the run ends."""
    from vpipe.data.dataset import Batch, DataSet

    collate = interface.get_collate_fn() or list

    class Adapted(DataSet):
        """The examples of an interface, by number."""

        draws = True

        def __init__(self, examples: Sequence[Any]) -> None:
            self._examples = examples
            self.vocab_size = interface.get_vocab_size()
            self.tokenizer = interface.get_tokenizer()

        def __len__(self) -> int:
            return len(self._examples)

        def batch(self, indices: Sequence[int]) -> Batch:
            made = interface.process_batch(collate([self._examples[int(index)] for index in indices]))
            if not isinstance(made, Mapping) or not {"inputs", "labels"} <= set(made):
                raise UserError(f'{type(interface).__name__}.process_batch must give {{"inputs": ..., "labels": ...}}')
            return Batch(made["inputs"], made["labels"])

    train, test = interface.get_train_test_split(test_size, seed)
    if not _is_numbered(train):
        if not rows:
            raise UserError(
                f"{type(interface).__name__} is an iterable, which has no length: set training.max_iterations, or let "
                "load_dataset give a list"
            )
        train = _Stream(lambda: interface.get_train_test_split(test_size, seed)[0], seed, rows)
    made = Adapted(train)
    if len(test):
        made.valid = Adapted(test)
    return made


def registered_dataset(config: DatasetConfig, sequence_length: int, seed: int = 1024, rows: int = 0) -> DataSet:
    """The data set that ``config.name`` has in ``DATASET_REGISTRY``."""
    found = DATASET_REGISTRY.get(config.name)
    if not (isinstance(found, type) and issubclass(found, DatasetInterface)):
        raise UserError(f"the data set {config.name!r} must be a class that extends DatasetInterface, not {found!r}")
    return adapt_dataset(found(config, sequence_length), config.test_size, seed, rows)
