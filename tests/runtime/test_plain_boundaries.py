"""Where a model is cut, and who runs the pieces, changes nothing: against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from runtime_gloo import Worlds
from runtime_plain import D, accumulate, batch, gradients, mse, pipedream, run, same, seeded, weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vpipe import Layer, Pipeline, UserError, add_loss


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_checkpoint_in_a_layer_reads_the_version_of_its_unit(reentrant: bool, num_ranks: int) -> None:
    def make() -> list[nn.Module]:
        return seeded(lambda: [nn.Linear(D, D), *[Checkpointed(reentrant) for _ in range(3)]])

    x, y = batch()
    layers = make()
    size = 4 // num_ranks
    stages = [nn.Sequential(*layers[at : at + size]) for at in range(0, 4, size)]
    pipe = Pipeline(
        make(), mse, schedule="pipedream", num_ranks=num_ranks, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.5)
    )
    for _ in range(2):
        losses = pipedream(stages, x, y, 4, rate=0.5)
        assert pipe.train_step(x, y) == pytest.approx(sum(losses) / 4, rel=1e-12)
        same(pipe.state_dict(), weights(layers))


def test_hooks_after_accumulation_are_called_under_pipedream() -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    x, y = batch()
    plain = seeded(lambda: [nn.Linear(D, D), nn.Linear(D, D)])
    layers = seeded(lambda: [nn.Linear(D, D), nn.Linear(D, D)])
    for layer in layers:
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
    pipe = Pipeline(layers, mse, schedule="pipedream", num_ranks=2, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.5))
    pipe.train_step(x, y)
    pipedream(plain, x, y, 4, rate=0.5, hook=halve)
    same(pipe.state_dict(), weights(plain))


def test_a_hook_that_updates_under_pipedream_is_refused() -> None:
    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad)

    layers = [nn.Linear(D, D), nn.Linear(D, D)]
    layers[0].weight.register_post_accumulate_grad_hook(update)
    pipe = Pipeline(layers, mse, schedule="pipedream", num_ranks=2, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.5))
    with pytest.raises(UserError, match=r"hook of 0\.weight changes the parameter.*synchronous schedule"):
        pipe.train_step(*batch())


class Counts(nn.Module):
    """Returns a buffer that the next call rewrites."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("calls", torch.zeros(D))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return self.linear(x), self.calls


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, both: tuple[Tensor, Tensor]) -> Any:
        return self.linear(both[0]) + both[1]


SEVERAL = [("gpipe", 2, None), ("looped-bfs", 1, 2), ("interleaved", 1, 2), ("zb-v", 1, None), ("1f1b", 1, None)]


@pytest.mark.parametrize(("schedule", "num_ranks", "stages"), SEVERAL)
def test_a_returned_buffer_that_the_next_unit_rewrites(schedule: str, num_ranks: int, stages: int | None) -> None:
    def make() -> list[nn.Module]:
        return seeded(lambda: [Counts(), Uses()])

    x, y = batch()
    plain, evaluated = make(), make()
    options = {"schedule": schedule, "num_ranks": num_ranks, "stages_per_rank": stages}
    pipe = Pipeline(make(), mse, **options)  # type: ignore[arg-type]
    assert pipe.train_step(x, y, update=False) == accumulate(plain, mse, x, y, 4)
    same(pipe.gradients(), gradients(plain))
    parts = zip(x.chunk(4), y.chunk(4), strict=True)
    with torch.no_grad():
        expected = sum(mse(run(evaluated, part), goal).item() / 4 for part, goal in parts)
    assert Pipeline(make(), mse, **options).evaluate(x, y) == expected  # type: ignore[arg-type]


def test_outputs_are_not_rewritten_by_the_next_unit() -> None:
    pipe = Pipeline([Counts()], lambda output, _: output[0].sum(), num_microbatches=2, num_ranks=1)
    _, calls = pipe.forward(torch.zeros(2, D))
    assert calls.tolist() == [1.0] * D + [2.0] * D


class Turned(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.t().contiguous().t()).tanh()


class Halves(nn.Module):
    """Gives a slice, whose rows have gaps, and a mean, whose gradient is one number repeated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Any) -> tuple[Tensor, Tensor]:
        x = x if isinstance(x, Tensor) else functional.gelu(x[0]) + x[1].sum()
        left, right = self.linear(x).chunk(2, -1)
        return right, left.mean(0, keepdim=True).expand_as(left)


class Last(nn.Module):
    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return x[0] + x[1]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["turned", "halves"])
def test_strides_at_a_boundary_change_no_bit(kind: str, num_ranks: int) -> None:
    def make() -> list[nn.Module]:
        if kind == "turned":
            return seeded(lambda: [Turned(48) for _ in range(4)])
        return seeded(lambda: [*[Halves(24) for _ in range(3)], Last()])

    x, y = batch(40, 48 if kind == "turned" else 24)
    plain = make()
    pipe = Pipeline(make(), mse, num_microbatches=2, num_ranks=num_ranks)
    assert pipe.train_step(x, y, update=False) == accumulate(plain, mse, x, y, 2)
    same(pipe.gradients(), gradients(plain))


def _gradients_of_a_rank() -> tuple[float, dict[str, Tensor]]:
    x, y = batch(40, 24)
    pipe = Pipeline(seeded(lambda: [*[Halves(24) for _ in range(3)], Last()]), mse, num_microbatches=2)
    loss = pipe.train_step(x, y, update=False)
    return loss, pipe.gradients()


@pytest.mark.slow
def test_strides_at_a_boundary_between_processes(worlds: Worlds) -> None:
    x, y = batch(40, 24)
    plain = seeded(lambda: [*[Halves(24) for _ in range(3)], Last()])
    expected = accumulate(plain, mse, x, y, 2)
    answers = worlds.run(2, _gradients_of_a_rank)
    assert [loss for loss, _ in answers] == [expected] * 2
    same(answers[0][1] | answers[1][1], gradients(plain))


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        add_loss(y.pow(2).mean() * 0.1)
        return y


def test_the_reported_loss_does_not_depend_on_the_cut() -> None:
    x, y = batch(9)
    plain = seeded(lambda: [Adds() for _ in range(8)])
    expected, sizes = 0.0, [3, 2, 2, 2]
    for part, goal in zip(x.split(sizes), y.split(sizes), strict=True):
        total, h = 0.0, part
        for layer in plain:
            h = layer(h)
            total += (h.pow(2).mean() * 0.1).item()
        expected += len(part) / 9 * (total + mse(h, goal).item())
    for num_ranks in (1, 2, 4, 8):
        pipe = Pipeline(seeded(lambda: [Adds() for _ in range(8)]), mse, num_microbatches=4, num_ranks=num_ranks)
        assert pipe.train_step(x, y, update=False) == expected


class InPlace(nn.Module):
    """Changes its input, and says so to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        x.mul_(2).clamp_(-1, 1)
        return self.linear(x)


@pytest.mark.parametrize("recompute", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_layer_that_secretly_works_in_place(schedule: str, num_ranks: int, recompute: float) -> None:
    def make() -> list[nn.Module]:
        return seeded(lambda: [nn.Linear(D, D), InPlace(), InPlace(), InPlace()])

    x, y = batch()
    plain = make()
    pipe = Pipeline(make(), mse, schedule=schedule, num_ranks=num_ranks, recompute=recompute)
    for _ in range(2):
        assert pipe.train_step(x, y, update=False) == accumulate(plain, mse, x, y, 4)
        same(pipe.gradients(), gradients(plain))


class Masked(nn.Module):
    """Gives a mask that needs no gradient, and changes one that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, found: Any) -> Any:
        if isinstance(found, tuple):
            x, mask = found
            mask.mul_(2.0)
            return self.linear(x) * mask
        return self.linear(found), torch.ones_like(found)


IN_PLACE: dict[str, Callable[[], list[nn.Module]]] = {
    "its input as it came": lambda: [nn.Linear(D, D), nn.Identity(), nn.SiLU(inplace=True), nn.Linear(D, D)],
    "a view": lambda: [nn.Unflatten(1, (2, 4)), nn.ELU(inplace=True), nn.Flatten(), nn.Linear(D, D)],
    "the batch": lambda: [InPlace(), nn.Linear(D, D), nn.Dropout(0.0), InPlace()],
    "a mask": lambda: [Masked(), Masked(), nn.Flatten(), InPlace()],
}


@pytest.mark.parametrize(
    "options", [{}, {"recompute": 1.0}, {"recompute": {1}}, {"recompute": {0, 1}}, {"swap": 1.0}, {"schedule": "zb-h1"}]
)
@pytest.mark.parametrize("partition", [[4], [1, 3], [2, 2], [1, 1, 1, 1]])
@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_change_in_place_of(kind: str, partition: list[int], options: Any) -> None:
    """By storage: of what a layer before has returned as it came, of a view of it, of a slice of the batch."""
    x, y = batch()
    plain = seeded(IN_PLACE[kind])
    pipe = Pipeline(seeded(IN_PLACE[kind]), mse, num_ranks=len(partition), partition=partition, **options)
    for _ in range(2):
        assert pipe.train_step(x.clone(), y, update=False) == accumulate(plain, mse, x.clone(), y, 4)
        same(pipe.gradients(), gradients(plain))


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(D, D), function

    def forward(self, *values: Any) -> Any:
        return self.function(self.linear, *values)


def _changed(linear: nn.Module, pair: tuple[Tensor, Tensor]) -> Any:
    first, second = pair
    first.mul_(0.5)
    return linear(first + second.view_as(first))


def _pair(second: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def both(linear: nn.Module, x: Tensor) -> Any:
        h = linear(x)
        return h, second(h)

    return both


def _twins(give: Callable[..., Any], *readers: tuple[str, Callable[..., Any]]) -> Callable[[], list[Layer]]:
    def make() -> list[Layer]:
        first = Layer(Apply(give), writes=("h", "y"))
        last = Layer(Apply(lambda linear, y, h: linear(y.view_as(h) + h)), reads=("y", "h"))
        return [first, *(Layer(Apply(f), reads=(name,), writes=("y",)) for name, f in readers), last]

    return make


SHARED: dict[str, tuple[Callable[[], Any], bool]] = {
    "a tensor twice in a tuple": (lambda: [Apply(_pair(lambda h: h)), *(Apply(_changed), nn.Tanh(), nn.Tanh())], False),
    "a tensor and its view": (lambda: [Apply(_pair(lambda h: h.view(-1))), *(Apply(_changed), nn.Tanh(), nn.Tanh())], False),
    "by another name": (_twins(_pair(lambda h: h), ("h", lambda _, h: h), ("y", lambda _, y: y.mul_(0.5))), True),
    "by a view": (_twins(_pair(lambda h: h[:, :1]), ("h", lambda _, h: h.view(-1)), ("y", lambda _, y: y.mul_(0.5))), True),
}  # fmt: skip
"""Layers, and whether all cuts refuse the change."""


@pytest.mark.parametrize("options", [{}, {"recompute": 1.0}, {"recompute": {0}}, {"recompute": {1}}])
@pytest.mark.parametrize("partition", [[4], [1, 3], [2, 2], [3, 1], [1, 1, 1, 1]])
@pytest.mark.parametrize("kind", SHARED)
def test_a_change_of_memory_that_two_values_share(kind: str, partition: list[int], options: Any) -> None:
    """It is that of plain torch, or refused in words."""
    x, y = batch()
    make, always = SHARED[kind]
    pipe = Pipeline(seeded(make), mse, num_ranks=len(partition), partition=partition, **options)
    try:
        loss = pipe.train_step(x, y, update=False)
    except UserError as error:
        assert "shares memory" in str(error) or "which another layer reads later" in str(error)
        with pytest.raises(UserError, match="in place"):
            pipe.evaluate(x, y)
        return
    assert not always
    plain = seeded(make)
    assert loss == accumulate(plain, mse, x, y, 4)
    same(pipe.gradients(), gradients(plain))


def test_parts_of_a_tensor_that_do_not_overlap_may_change() -> None:
    def make() -> list[nn.Module]:
        def changed(linear: nn.Module, halves: tuple[Tensor, Tensor]) -> Any:
            return linear(torch.cat((halves[0].mul_(0.5), halves[1]), 1))

        return [Apply(lambda _, x: (x[:, :4], x[:, 4:])), Apply(changed)]

    x, y = batch()
    plain, pipe = seeded(make), Pipeline(seeded(make), mse, num_ranks=2)
    assert pipe.train_step(x.clone(), y, update=False) == accumulate(plain, mse, x, y, 4)
    same(pipe.gradients(), gradients(plain))


class Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).tanh()  # its backward reads its result


@pytest.mark.parametrize("recompute", [set(), {0}, {1}])
def test_a_change_that_plain_torch_refuses_is_refused_within_a_stage(recompute: set[int]) -> None:
    """... or gives the gradients of a model in which the next layer had a copy."""
    x, y = batch()
    plain = seeded(lambda: [Tanh(), InPlace()])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        accumulate(plain, mse, x, y, 4)
    pipe = Pipeline(seeded(lambda: [Tanh(), InPlace()]), mse, num_ranks=1, recompute=recompute)
    if not recompute:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pipe.train_step(x, y, update=False)
        return
    plain = seeded(lambda: [Tanh(), InPlace()])
    for part, goal in zip(x.chunk(4), y.chunk(4), strict=True):
        (mse(plain[1](plain[0](part).clone()), goal) / 4).backward()
    try:
        pipe.train_step(x, y, update=False)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        same(pipe.gradients(), gradients(plain))


class Joins(nn.Module):
    """Uses each argument once, and returns the sum ``times`` times in a tuple."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(D, D), times

    def forward(self, *found: Any) -> Any:
        first, *others = found[0] if isinstance(found[0], tuple) else found
        h = self.linear(first).tanh()
        for number, other in enumerate(others, 1):
            h = h + (number * other).sin()
        return (h,) * self.times if self.times > 1 else h


READ_OFTEN: dict[str, list[tuple[tuple[str, ...], tuple[str, ...], int]]] = {
    "a skip into residual blocks": [
        (("x",), ("h",), 1), (("h", "h", "h"), ("x",), 1), (("x", "h"), ("x",), 1), (("h", "x", "h"), ("x",), 1),
    ],
    "one tensor three times in a tuple": [
        (("x",), ("x",), 3), (("x",), ("x",), 3), (("x",), ("x",), 2), (("x",), ("x",), 1),
    ],
    "one tensor by three names": [
        (("x",), ("a", "b", "c"), 3), (("a",), ("x",), 1), (("x", "b"), ("x",), 1), (("x", "c", "c"), ("x",), 1),
    ],
}  # fmt: skip
"""Per layer what it reads and writes, and how often the tuple that it returns has its result."""


@pytest.mark.parametrize(
    "options", [{}, {"recompute": {1}}, {"recompute": 1.0}, {"swap": {0, 2}}, {"schedule": "zb-h1"}]
)
@pytest.mark.parametrize("partition", [[4], [1, 3], [2, 2], [1, 1, 1, 1]])
@pytest.mark.parametrize("kind", READ_OFTEN)
def test_the_gradients_of_a_value_are_added_use_by_use(kind: str, partition: list[int], options: Any) -> None:
    """The brackets of the sum are autograd's own, latest use first, wherever the readers are."""
    x, y = batch()
    plain, modules = (seeded(lambda: [Joins(times) for *_, times in READ_OFTEN[kind]]) for _ in range(2))
    for part, goal in zip(x.chunk(4), y.chunk(4), strict=True):
        values: dict[str, Any] = {"x": part}
        for module, (reads, writes, _) in zip(plain, READ_OFTEN[kind], strict=True):
            result = module(*[values[name] for name in reads])
            values.update(zip(writes, result, strict=True) if len(writes) > 1 else [(writes[0], result)])
        (mse(values["x"], goal) / 4).backward()
    layers = [Layer(m, reads, writes) for m, (reads, writes, _) in zip(modules, READ_OFTEN[kind], strict=True)]
    pipe = Pipeline(layers, mse, num_ranks=len(partition), partition=partition, **options)
    pipe.train_step(x, y, update=False)
    same(pipe.gradients(), gradients(plain))
