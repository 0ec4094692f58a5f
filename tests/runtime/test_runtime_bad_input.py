"""Bad input: one sentence that names the place and the remedy, and a pipeline that can go on afterwards."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from runtime_models import WIDTH, build
from runtime_support import Case, differing, pipeline
from torch import nn

from vpipe import Layer, Pipeline, UserError
from vpipe.layer import TiedWeight
from vpipe.runtime.updates.update import LossScale
from vpipe.schedule import catalog
from vpipe.schedule.lower import lower

mse = nn.functional.mse_loss
sgd: Callable[[Any], Any] = lambda ps: torch.optim.SGD(ps, lr=0.1)  # noqa: E731
Point = namedtuple("Point", "x y")


class Gives(nn.Module):
    def __init__(self, result: Callable[[Any], Any]) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Any) -> Any:
        return self.result(x)


def _layers(number: int = 4) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(number)]


def _train(layers: list[Any], rows: int = 8, loss: Any = mse, **more: Any) -> None:
    pipe = Pipeline(layers, loss, **({"num_ranks": 2, "num_microbatches": 4, "optimizer": sgd} | more))
    pipe.train_step(torch.randn(rows, WIDTH), torch.randn(rows, WIDTH))


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda x: object(), "a object cannot travel"),
        (lambda x: {1, 2}, "a set cannot travel"),
        (lambda x: Point(x, x), "a Point cannot travel"),
        (lambda x: {"x": x, "f": print}, "a builtin_function_or_method cannot travel"),
        (lambda x: x.to_sparse(), "to_dense"),
        (lambda x: x.to(torch.float8_e4m3fn), "float8_e4m3fn cannot travel"),
    ],
)
@pytest.mark.parametrize("recompute", [0.0, 1.0])
def test_a_result_that_cannot_travel(result: Callable[[Any], Any], words: str, recompute: float) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), Layer(Gives(result), name="encoder"), *_layers(2)]
    with pytest.raises(UserError, match=r"layer 1 \(encoder\) returned") as error:
        _train(layers, recompute=recompute)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"partition": [2, 3]}, r"covers 5 layers, but the model has 4; make the sum 4"),
        ({"partition": [4, 0]}, r"empty stage"),
        ({"partition": [2, 1, 1]}, r"has 3 stages, but 1f1b on 2 ranks has 2"),
        ({"schedule": "pipedream-2bw", "num_ranks": 4, "num_microbatches": 2}, r"need at least 3 microbatches"),
        ({"schedule": "1f1bb"}, r"did you mean '1f1b'"),
        ({"num_ranks": 5}, r"4 layers cannot fill 5 stages"),
        ({"recompute": 1.5}, r"between 0 and 1"),
        ({"recompute": [0.5]}, r"1 ratios, but there are 2 stages"),
        ({"replicas": 3}, r"2 ranks cannot hold 3 replicas"),
        ({"replicas": (2, 1)}, r"need 3 ranks, but there are 2"),
        ({"replicas": (2, 1), "num_ranks": 3}, r"same number of replicas on every stage"),
        (
            {"schedule": "pipedream", "replicas": (2, 1), "num_ranks": 3, "num_microbatches": 5},
            r"not a multiple of the 2 replicas",
        ),
        ({"rows": 3}, r"a batch of 3 rows cannot be cut into 4 microbatches; give at least 4 rows"),
        ({"optimizer": None}, r"has no optimizer; give Pipeline\(optimizer="),
        ({"tied": [TiedWeight(((0, "weight"), (9, "weight")))]}, r"layer 9, but layers are 0..3"),
        (
            {"tied": [TiedWeight(((0, "weight"), (3, "waight")))]},
            r"layer 3 .*no parameter 'waight'.*did you mean 'weight'",
        ),
        ({"tied": [TiedWeight(((0, "weight"), (3, "bias")))]}, r"shapes"),
        (
            {"tied": [TiedWeight(((0, "weight"), (3, "weight")))], "schedule": "pipedream"},
            r"tied weights need a synchronous",
        ),
        ({"loss": lambda output, target: (output - target) ** 2}, r"loss must be a scalar.*reduce it"),
        ({"loss": lambda output, target: 1.0}, r"loss must be a scalar.*a float"),
        (
            {"schedule": "pipedream", "loss_scale": LossScale(2.0, dynamic=True)},
            r"dynamic loss scale needs a synchronous",
        ),
    ],
)
def test_one_sentence(more: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        _train(_layers(), **more)
    assert "\n" not in str(error.value)


def test_inputs_by_name() -> None:
    layers = [Layer(nn.Bilinear(WIDTH, WIDTH, WIDTH), reads=("image", "mask")), nn.Linear(WIDTH, WIDTH)]
    pipe = Pipeline(layers, mse, num_ranks=2, num_microbatches=2, optimizer=sgd)
    x = torch.randn(4, WIDTH)
    with pytest.raises(UserError, match=r"reads 'mask', but its inputs have only image"):
        pipe.train_step({"image": x}, x)
    with pytest.raises(UserError, match=r"give its inputs as a dict"):
        pipe.train_step(x, x)
    with pytest.raises(UserError, match=r"needs the targets"):
        pipe.train_step({"image": x, "mask": x})
    pipe.train_step({"image": x, "mask": x}, x)


def test_rows_that_differ() -> None:
    pipe = Pipeline(_layers(), mse, num_ranks=2, num_microbatches=2, optimizer=sgd)
    with pytest.raises(UserError, match=r"inputs have 4 rows, but the targets have 6"):
        pipe.train_step(torch.randn(4, WIDTH), torch.randn(6, WIDTH))
    with pytest.raises(UserError, match=r"same number of rows"):
        pipe.train_step((torch.randn(4, WIDTH), torch.randn(5, WIDTH)), torch.randn(4, WIDTH))


def test_accumulation_needs_a_synchronous_schedule() -> None:
    pipe = Pipeline(_layers(), mse, schedule="pipedream", num_ranks=2, num_microbatches=2, optimizer=sgd)
    with pytest.raises(UserError, match=r"cannot be accumulated"):
        pipe.train_step(torch.randn(4, WIDTH), torch.randn(4, WIDTH), update=False)


class InPlace(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.mul_(2)


class Add(nn.Module):
    def forward(self, a: Any, b: Any) -> Any:
        return a + b


@pytest.mark.parametrize("partition", [[4], [2, 2], [1, 3]])
def test_a_value_of_several_readers_is_not_changed_in_place(partition: list[int]) -> None:
    """Each reader may be on another rank, with a copy of its own; so it is refused wherever the model is cut."""
    layers = [
        Layer(nn.Linear(WIDTH, WIDTH), writes=("h",)),
        Layer(InPlace(), reads=("h",), writes=("a",)),
        Layer(nn.Linear(WIDTH, WIDTH), reads=("h",), writes=("b",)),
        Layer(Add(), reads=("a", "b")),
    ]
    with pytest.raises(UserError, match=r"layer 1 \(InPlace\) changes its input in place, and with it 'h'"):
        _train(layers, partition=partition, num_ranks=len(partition))


def test_an_error_of_the_users_own_keeps_its_place_and_the_pipeline_goes_on() -> None:
    """A failed step leaves no half of a gradient behind: the next one has the bits of an undisturbed pipeline."""
    case = Case("1f1b", "plain", 3, 4)
    model, twin = build("plain", 10), build("plain", 10)
    pipe, other = pipeline(case, model, 3), pipeline(case, twin, 3)
    inputs, targets = model.data(8, 0)
    broken = model.layers[5].forward
    calls = []

    def sometimes(x: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("mine")
        return broken(x)

    model.layers[5].forward = sometimes
    with pytest.raises(ZeroDivisionError, match="mine") as error:
        pipe.train_step(inputs, targets)
    assert any("rank 1, stage 1, action 1F2, microbatch 2" in note for note in error.value.__notes__)
    assert pipe.gradients() == {}
    for step in range(2):
        inputs, targets = model.data(8, step)
        assert pipe.train_step(inputs, targets) == other.train_step(inputs, targets)
    assert not differing(pipe.state_dict(), other.state_dict())


def test_sharing_that_is_declared() -> None:
    """Layers that hold the very same parameter and say so each get their own; both stay equal."""
    layers = _layers()
    layers[3].weight = layers[0].weight
    tied = [TiedWeight(((0, "weight"), (3, "weight")))]
    pipe = Pipeline(layers, mse, num_ranks=2, num_microbatches=2, optimizer=sgd, tied=tied)
    pipe.train_step(torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    state = pipe.state_dict()
    assert torch.equal(state["0.weight"], state["3.weight"])


@pytest.mark.parametrize(("option", "kind"), [("recompute", "R"), ("swap", "OUT")])
def test_a_lowered_program_says_itself_what_is_recomputed_and_swapped(option: str, kind: str) -> None:
    program = lower(catalog.build("gpipe", 2, 4))
    with pytest.raises(
        UserError, match=f"{option} names layers of stage 0, but the lowered program has no {kind} there"
    ):
        _train(_layers(), schedule=program, **{option: 1.0})
    _train(_layers(), schedule=program)


@pytest.mark.parametrize("norm", [0, 0.0, -1, float("nan")])
def test_a_norm_that_clips_all_or_nothing_is_refused(norm: float) -> None:
    with pytest.raises(UserError, match=r"clip_norm is .*; give a number above 0, or None"):
        _train(_layers(), clip_norm=norm)


@pytest.mark.parametrize("values", [(0.0,), (-1.0,), (float("inf"),), (float("nan"),), (1.0, True, 0)])
def test_a_loss_scale_that_is_none_is_refused(values: tuple[Any, ...]) -> None:
    with pytest.raises(UserError, match=r"the loss scale is .*; give a finite number above 0"):
        LossScale(*values)


def test_an_optimizer_that_nothing_would_step_is_refused() -> None:
    pipe = Pipeline(_layers(), nn.functional.mse_loss, num_ranks=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(UserError, match="the optimizer of stage 1 cannot be replaced"):
        pipe.optimizers[1] = pipe.optimizers[0]


def test_a_second_thread_is_refused() -> None:
    """While the first one is in the middle of a step."""
    inside, done = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert done.wait(60)
            return x

    pipe = Pipeline([Waits(), nn.Linear(4, 4)], nn.functional.mse_loss, num_ranks=2, num_microbatches=2)
    x = torch.zeros(4, 4)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(pipe.evaluate, x, x)
        assert inside.wait(60)
        with pytest.raises(UserError, match="in the middle of a step of another thread"):
            pipe.evaluate(x, x)
        done.set()
        first.result()
    pipe.evaluate(x, x)


class Alias(nn.Module):
    """Reads its weight by a name that no version is put under."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weights = [self.linear.weight]

    def forward(self, x: Any) -> Any:
        return x @ self.weights[0].t()


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda: [Layer(nn.Tanh(), writes=("x", "x"))] * 2, {}, "writes x, x; give each value .* a name of its own"),
        (
            lambda: [Alias() for _ in range(4)],
            {"schedule": "pipedream"},
            r"reads the weight \d.linear.weight by an alias",
        ),
        (
            lambda: [nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)],
            {"replicas": 2},
            r"layer 0 \(Linear\) cannot be copied for the other replicas .* give a function that builds it",
        ),
        (
            lambda: [nn.Linear(WIDTH, WIDTH) for _ in range(2)],
            {"optimizer": torch.optim.LBFGS},
            "LBFGS needs a closure that computes the loss again",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_what_no_pipeline_can_do_is_refused_in_words(make: Any, options: dict[str, Any], words: str) -> None:
    x = torch.randn(8, WIDTH)
    plain = {"num_ranks": 2, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), **options}
    with pytest.raises(UserError, match=words):
        Pipeline(make(), nn.functional.mse_loss, num_microbatches=4, **plain).train_step(x, x)
