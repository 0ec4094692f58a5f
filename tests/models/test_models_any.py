"""Any module: cut by running its forward, trained in a pipeline equal to itself, its names kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vpipe
from vpipe.errors import UserError


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + (y if scale is None else y * scale)


class Gpt(nn.Module):
    """A parameter of its own, a tied head, a buffer, blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 16), nn.Parameter(torch.randn(8, 16) * 0.02)
        self.blocks = nn.ModuleList([Block(16) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, scale=self.scale)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Unet(nn.Module):
    """Skips over several blocks, a chain, an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)])
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1))
        self.up = nn.ModuleList([nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for part in self.down:
            x = F.relu(part(x))
            skips.append(x)
        x = self.middle(x)
        for part in self.up:
            x = part(torch.cat([x, skips.pop()], 1))
        return x


class Attributes(nn.Module):
    """No list at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(F.relu(self.second(F.relu(self.first(x)))))  # type: ignore[no-any-return]


class Towers(nn.Module):
    """Two inputs by name, a dict of modules, a dict as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(6, 8)})
        self.blocks = nn.ModuleList([Block(8) for _ in range(2)])

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        x = self.towers["a"](a) * self.towers["b"](b)
        for block in self.blocks:
            x = block(x)
        return {"x": x, "mean": x.mean(-1)}


class Looped(nn.Module):
    """Blocks that are called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(6) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x


class Forward(nn.Module):
    """Blocks, and a forward that is told."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.blocks, self.run = nn.ModuleList([Block(6) for _ in range(3)]), run
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.count: int = 0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def in_order(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def twice() -> nn.Module:
    model = Forward(in_order)
    model.blocks.append(model.blocks[0])
    return model


def weight_normed() -> nn.Module:
    model = Forward(in_order)
    nn.utils.parametrizations.weight_norm(model.blocks[1].up)  # type: ignore[arg-type]
    return model


def numbers(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(1))


def squares(output: Any, target: Tensor) -> Tensor:
    values = output.values() if isinstance(output, dict) else [output]
    return torch.stack([value.square().mean() for value in values]).sum() + 0 * target.sum()


TOKENS = torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(1))
MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "gpt": (Gpt, TOKENS),
    "unet": (Unet, numbers(4, 3, 8, 8)),
    "attributes": (Attributes, numbers(4, 6)),
    "towers": (Towers, {"a": numbers(4, 6), "b": numbers(4, 6).flip(0)}),
    "looped": (Looped, numbers(4, 6)),
    "standing twice": (twice, numbers(4, 6)),
    "weight norm": (weight_normed, numbers(4, 6)),
    "statistics": (lambda: Forward(lambda model, x: in_order(model, model.norm(model.blocks[0](x)))), numbers(4, 6)),
    "a dict of one": (lambda: Forward(in_order), {"x": numbers(4, 6)}),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 3),
        numbers(4, 5, 16),
    ),
}


def half(inputs: Any, part: int) -> Any:
    if isinstance(inputs, dict):
        return {name: tensor.chunk(2)[part] for name, tensor in inputs.items()}
    return inputs.chunk(2)[part]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_as_itself(name: str, schedule: str) -> None:
    make, inputs = MODULES[name]
    torch.manual_seed(0)
    module = make()
    plain = copy.deepcopy(module)
    target = numbers(4)
    pipe = vpipe.Pipeline(module, squares, example=inputs, num_ranks=2, num_microbatches=2, schedule=schedule)
    assert len(pipe.partition) == 2
    loss = pipe.train_step(inputs, target, update=False)
    expected = 0.0
    for part in range(2):
        given = half(inputs, part)
        unit = squares(plain(**given) if isinstance(given, dict) else plain(given), target.chunk(2)[part])
        (unit / 2).backward()
        expected += unit.item() / 2
    assert loss == expected
    names = {key: parameter for key, parameter in plain.named_parameters() if parameter.grad is not None}
    first = {id(parameter): key for key, parameter in plain.named_parameters()}
    same = {key: first[id(parameter)] for key, parameter in plain.named_parameters(remove_duplicate=False)}
    sums: dict[str, Tensor] = {}
    for part_module in pipe.modules().values():
        for own, parameter in part_module.named_parameters():
            if parameter.grad is not None:
                full = same[part_module.own_names()[own]]  # type: ignore[operator]
                sums[full] = sums[full] + parameter.grad if full in sums else parameter.grad
    assert sums.keys() == names.keys()
    for key, parameter in names.items():
        torch.testing.assert_close(sums[key], parameter.grad, rtol=1e-5, atol=1e-7)
        if name not in (
            "gpt",
            "looped",
            "standing twice",
            "statistics",
        ):  # tied weights and blocks that are called twice add in another order
            assert torch.equal(sums[key], parameter.grad), key
    told = pipe.state_dict()
    assert all(torch.equal(told[key], buffer) for key, buffer in plain.named_buffers())
    assert "equal" in pipe.check(inputs, target)
    pipe.close()


@pytest.mark.parametrize("name", MODULES)
def test_names_go_both_ways(name: str) -> None:
    """``state_dict`` is the module's own, and a plain module's is loaded."""
    make, inputs = MODULES[name]
    pipe = vpipe.Pipeline(make(), squares, example=inputs, num_ranks=2, num_microbatches=2)
    other = make()
    assert pipe.state_dict().keys() == other.state_dict().keys() | (set(pipe.state_dict()) - set(other.state_dict()))
    pipe.load_state_dict(other.state_dict())
    for key, tensor in other.state_dict().items():
        assert torch.equal(pipe.state_dict()[key], tensor), key
    other.load_state_dict(pipe.state_dict())
    pipe.close()


class Looks(nn.Module):
    """Looks at what a block computes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(6) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](x) if x.sum() > 0 else x


def counted(model: Any, x: Tensor) -> Tensor:
    model.count += 1
    return in_order(model, x) * model.count


def stepped(model: Any, x: Tensor) -> Tensor:
    model.steps += 1
    return in_order(model, x) * model.steps


def hooked() -> nn.Module:
    model = Forward(in_order)
    model.register_forward_hook(lambda module, args, output: output * 2)
    return model


@pytest.mark.parametrize(
    ("module", "example", "words"),
    [
        (Attributes, None, "give Pipeline.*example=inputs"),
        (Attributes, [1, 2], "must be a tensor, or a dict"),
        (Towers, (numbers(4, 6), numbers(4, 6)), r"or a dict of its forward's arguments \(a, b\)"),
        (lambda: Forward(counted), numbers(4, 6), "changes count outside its blocks"),
        (lambda: Forward(stepped), numbers(4, 6), "changes steps outside its blocks"),
        (hooked, numbers(4, 6), "changes a result by a hook"),
        (lambda: Forward(lambda model, x: x * 2), numbers(4, 6), "calls no module with weights"),
        (Looks, numbers(4, 6), "looks at values"),
        (Attributes, numbers(4, 7), "first .Linear. .* cannot be multiplied"),
    ],
)
def test_what_cannot_be_cut_is_refused(module: Callable[[], nn.Module], example: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        vpipe.Pipeline(module(), squares, example=example, num_ranks=2)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda model, x: in_order(model, x) if model.training else model.blocks[0](x), "another mode"),
        (lambda model, x: checkpoint(model.blocks[1], model.blocks[0](x), use_reentrant=False), "called in a backward"),
    ],
)
def test_a_forward_that_goes_another_way_later_is_refused(run: Callable[[Any, Tensor], Any], words: str) -> None:
    pipe = vpipe.Pipeline(Forward(run), squares, example=numbers(4, 6), num_ranks=2, num_microbatches=2)

    def both() -> None:
        pipe.train_step(numbers(4, 6), numbers(4), update=False)
        pipe.evaluate(numbers(4, 6), numbers(4))

    with pytest.raises(UserError, match=words):
        both()
    pipe.close()
