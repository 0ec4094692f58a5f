"""A model and a data set written for OurGPipe's interfaces are trained like any other."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vpipe.config import DatasetConfig, ModelConfig
from vpipe.errors import UserError
from vpipe.interfaces import (
    DatasetInterface,
    ModelInterface,
    StageInterface,
    adapt_dataset,
    adapt_model,
    registered_dataset,
    registered_model,
    stage_sizes,
)
from vpipe.layer import Layer
from vpipe.models.model import Model, run
from vpipe.registry import DATASET_REGISTRY, MODEL_REGISTRY, STAGE_REGISTRY


class Tiny(ModelInterface):
    """Embedding, three linear layers, head."""

    def get_model_config(self) -> dict[str, dict[str, Any]]:
        size, vocab = self.config.hidden_size, self.get_vocab_size()
        blocks = {f"linear_{i}": {"in_features": size, "out_features": size} for i in range(self.config.num_layers)}
        return {
            "embed": {"num_embeddings": vocab, "embedding_dim": size},
            **blocks,
            "head": {"in_features": size, "out_features": vocab},
        }

    def create_layer(self, layer_type: str, params: dict[str, Any]) -> nn.Module:
        return nn.Embedding(**params) if layer_type == "embed" else nn.Linear(**params)


class Letters(DatasetInterface):
    """Each example is a word; the label of a letter is the next one."""

    def load_dataset(self) -> Sequence[str]:
        return [f"{chr(97 + i % 26)}{chr(97 + i // 26)}abc" for i in range(100)]

    def get_vocab_size(self) -> int:
        return 26

    def process_batch(self, batch: list[str]) -> Mapping[str, Tensor]:
        ids = torch.tensor([[ord(letter) - 97 for letter in word] for word in batch])
        return {"inputs": ids[:, :-1], "labels": ids[:, 1:]}


CONFIG = ModelConfig(name="tiny", hidden_size=8, num_layers=3, vocab_size=-1)


@pytest.fixture
def registered() -> Iterator[None]:
    MODEL_REGISTRY.register("tiny")(Tiny)
    DATASET_REGISTRY.register("letters")(Letters)
    yield
    for registry in (MODEL_REGISTRY, DATASET_REGISTRY, STAGE_REGISTRY):
        for name in ("tiny", "letters", "function"):
            registry._entries.pop(name, None)


@pytest.mark.usefixtures("registered")
def test_a_registered_model_and_data_set_learn() -> None:
    data = registered_dataset(DatasetConfig(name="letters"), sequence_length=4)
    model = registered_model(CONFIG, vocab_size=data.vocab_size, seed=1)
    assert (model.vocab_size, model.hidden_size, len(model.layers)) == (26, 8, 5)
    assert (len(data), len(data.valid or [])) == (90, 10)
    modules = model.build()
    batch = data.batch(range(16))
    assert model.count(batch.targets) == 64
    optimizer = torch.optim.Adam([p for module in modules for p in module.parameters()], lr=0.05)
    losses = []
    for _ in range(20):
        loss = model.loss(run(model.layers, modules, batch.inputs), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2


def test_only_the_owner_builds_a_layer_and_its_weights_do_not_depend_on_the_others() -> None:
    model = adapt_model(Tiny(CONFIG.model_copy(update={"vocab_size": 26})), seed=3)
    alone = model.layers[2].build()
    together = model.build()[2]
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), together.parameters(), strict=True))
    assert pickle.loads(pickle.dumps(model.layers[1])).name == "linear_0"  # noqa: S301


def test_partition_is_even_and_checked() -> None:
    tiny = Tiny(CONFIG)
    assert tiny.get_stage_partition(2) == [[0, 1, 2], [3, 4]]
    assert stage_sizes(tiny, 3) == [2, 2, 1]

    class Lost(Tiny):
        def get_stage_partition(self, num_stages: int) -> list[list[int]]:
            return [[0], [2, 3, 4]]

    with pytest.raises(UserError, match=r"get_stage_partition\(2\) gave .* the layers 0 to 4, each once and in order"):
        stage_sizes(Lost(CONFIG), 2)


@pytest.mark.usefixtures("registered")
def test_a_registered_stage_has_its_own_input_and_loss() -> None:
    @STAGE_REGISTRY.register("tiny")
    class Squared(StageInterface):
        def prepare_input(self, x: Tensor, mb: int | None = None) -> Tensor:
            return (x + 1) % 26

        def compute_loss(self, output: Tensor, labels: Tensor) -> Tensor:
            return output.square().mean()

    model = registered_model(CONFIG, vocab_size=26)
    embed = model.layers[0].build()
    assert isinstance(embed, nn.Embedding)
    assert torch.equal(embed(torch.tensor([3])), embed.weight[4:5])
    assert model.loss(torch.full((2, 2), 3.0), None) == 9.0


def test_stated_flops_are_used() -> None:
    class Counted(Tiny):
        def get_flops_per_token(self) -> float:
            return 12345.0

    config = CONFIG.model_copy(update={"vocab_size": 26})
    assert adapt_model(Counted(config)).flops_per_token == 12345.0
    assert Tiny(config).get_flops_per_token() == 6 * (3 * 64 + 8 * 26)


@pytest.mark.usefixtures("registered")
def test_a_function_that_makes_a_model_may_be_registered() -> None:
    @MODEL_REGISTRY.register("function")
    def function(*, hidden_size: int, vocab_size: int, depth: int = 1, seed: int = 0) -> Model:
        return adapt_model(
            Tiny(ModelConfig(name="x", hidden_size=hidden_size, num_layers=depth, vocab_size=vocab_size))
        )

    model = registered_model(ModelConfig(name="function", hidden_size=8, extra={"depth": 2}), vocab_size=26)
    assert len(model.layers) == 4
    with pytest.raises(UserError, match=r"model\.depth is 'two' \(str\); it must be int"):
        registered_model(ModelConfig(name="function", extra={"depth": "two"}), vocab_size=26)
    with pytest.raises(UserError, match=r"model\.dpth is not an option of 'function'"):
        registered_model(ModelConfig(name="function", extra={"dpth": 2}), vocab_size=26)


@pytest.mark.usefixtures("registered")
def test_a_function_without_a_seed_is_seeded_by_us() -> None:
    """Else every rank would begin with weights of its own."""

    @MODEL_REGISTRY.register("seedless")
    def seedless(*, tied: bool = True) -> Model:
        return Model([Layer(lambda: nn.Linear(4, 4))] * 2, nn.functional.mse_loss, len)

    first, same, other = (registered_model(ModelConfig(name="seedless"), 26, seed).build() for seed in (1, 1, 2))
    assert torch.equal(first[0].weight, same[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)
    assert not torch.equal(first[0].weight, first[1].weight)
    with pytest.raises(UserError, match=r"model\.tied is 'no' \(str\); it must be bool"):
        registered_model(ModelConfig(name="seedless", extra={"tied": "no"}))


def test_a_collate_function_and_a_tokenizer_are_used() -> None:
    class Padded(Letters):
        def get_tokenizer(self) -> Any:
            return {"a": 0}

        def get_vocab_size(self) -> int:
            return DatasetInterface.get_vocab_size(self) + 25

        def get_collate_fn(self) -> Any:
            return lambda words: [word[::-1] for word in words]

    data = adapt_dataset(Padded(DatasetConfig(name="x"), 4), test_size=0.0)
    assert data.valid is None
    assert data.batch([0]).inputs.tolist() == [[2, 1, 0, 0]]  # type: ignore[union-attr]


def test_what_is_wrong_with_an_implementation_is_said() -> None:
    class NoLabels(Letters):
        def process_batch(self, batch: list[str]) -> Mapping[str, Tensor]:
            return {"inputs": torch.zeros(1)}

    class NoModule(Tiny):
        def create_layer(self, layer_type: str, params: dict[str, Any]) -> nn.Module:
            return None  # type: ignore[return-value]

    class NoSize(Letters):
        def get_vocab_size(self) -> int:
            return DatasetInterface.get_vocab_size(self)

    with pytest.raises(UserError, match=r"NoLabels\.process_batch must give"):
        adapt_dataset(NoLabels(DatasetConfig(name="x"), 4)).batch([0])
    with pytest.raises(UserError, match=r"NoModule.create_layer\('embed'\) gave None"):
        adapt_model(NoModule(CONFIG)).layers[0].build()
    with pytest.raises(UserError, match="NoSize has no tokenizer with a size"):
        adapt_dataset(NoSize(DatasetConfig(name="x"), 4))
