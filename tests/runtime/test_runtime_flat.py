"""Small parameters updated together: the bits of the plain loop, the user's own optimizer, and who is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support import Case, check, differing
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import ExponentialLR

from vpipe import Pipeline
from vpipe.runtime.updates import flat
from vpipe.runtime.updates.flat import FlatStep
from vpipe.train.checkpoints import layer_file

Make = Callable[[Any], optim.Optimizer]
WAYS: dict[str, Make] = {
    "adam": partial(optim.Adam, lr=1e-2),
    "adam-decay": partial(optim.Adam, lr=1e-2, weight_decay=0.1, maximize=True),
    "adam-amsgrad": partial(optim.Adam, lr=1e-2, amsgrad=True),
    "adam-tensor-lr": lambda ps: optim.Adam(ps, lr=torch.tensor(1e-2)),
    "adamw": partial(optim.AdamW, lr=1e-2, weight_decay=0.1),
    "nadam": partial(optim.NAdam, weight_decay=0.1),
    "radam": partial(optim.RAdam, lr=1e-2, weight_decay=0.1),
    "adamax": optim.Adamax,
    "rmsprop": partial(optim.RMSprop, momentum=0.9, centered=True),
    "adagrad": partial(optim.Adagrad, lr_decay=0.1),
    "adadelta": optim.Adadelta,
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
    "sgd": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}
SHAPES = ((64,), (8, 8), (3, 64), (7,), (), (1,), (128, 5), (33, 2), (1024,), (13,))
"""Some are multiples of 64 numbers, some are not."""


def _parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


class Twins:
    """The same parameters twice: one optimizer steps by itself, one by ``FlatStep``."""

    def __init__(self, make: Make, dtype: torch.dtype = torch.float32) -> None:
        self.plain, self.ours = _parameters(dtype), _parameters(dtype)
        self.expected, self.optimizer = make(self.plain), make(self.ours)
        self.flat = FlatStep(self.optimizer, self.ours)
        self._generator = torch.Generator().manual_seed(2)

    def step(self, num: int = 1, without: Sequence[int] = ()) -> int:
        """Updates with the same gradients; the number of blocks of the last."""
        for _ in range(num):
            for place, pair in enumerate(zip(self.plain, self.ours, strict=True)):
                gradient = torch.randn(pair[0].shape, generator=self._generator).to(pair[0].dtype)
                for parameter in pair:
                    parameter.grad = None if place in without else gradient.clone()
            self.expected.step()
            blocks = self.flat.prepare()
            for block in blocks:
                block.move_together()
            self.flat.step()
            found = len(blocks)
            assert [p.grad is None for p in self.ours] == [place in without for place in range(len(self.ours))]
            self.flat.clear()
            assert all(p.grad is None for p in self.ours)
        return found

    def differ(self) -> list[str]:
        settings = [
            [{name: value for name, value in group.items() if name != "params"} for group in each.param_groups]
            for each in (self.optimizer, self.expected)
        ]
        assert settings[0] == settings[1]
        return differing(_state(self.optimizer), _state(self.expected))


def _state(optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and all that the optimizer says of them."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    found = {f"{place}": p.detach() for place, p in enumerate(held)}
    for place, state in optimizer.state_dict()["state"].items():
        found |= {f"{place}.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
def test_bits_of_the_plain_loop(way: str, dtype: torch.dtype) -> None:
    twins = Twins(WAYS[way], dtype)
    assert twins.step() == 0  # torch makes the states
    assert twins.step(30) == 1
    assert not twins.differ()


def test_a_tail_rounds_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without the rule of 64, SGD of bfloat16 has other bits where torch's loops are wide."""
    monkeypatch.setattr(flat, "TAILLESS", 1)
    twins = Twins(partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01), torch.bfloat16)
    twins.step(40)
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert twins.differ()


def test_a_count_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another negative control: were the counts of a block not compared, one of them would become everybody's."""
    twins = Twins(WAYS["adam"])
    twins.step(3)
    for optimizer in (twins.expected, twins.optimizer):
        optimizer.state[optimizer.param_groups[0]["params"][2]]["step"] += 5
    wrong = copy.deepcopy(twins)
    assert twins.step(3) == 1
    assert not twins.differ()
    monkeypatch.setattr("vpipe.runtime.updates.blocks.Block.is_as_it_was", lambda self, optimizer: True)
    wrong.flat = FlatStep(wrong.optimizer, wrong.ours)
    monkeypatch.setattr(flat, "_form", lambda parameter, state: "alike" if parameter.numel() % 64 == 0 else None)
    wrong.step(3)
    assert wrong.differ()


@pytest.mark.parametrize("way", ["adam", "sgd", "nadam"])
def test_whatever_happens_between_two_updates(way: str) -> None:
    """Gradients that are missing, states that are loaded or written, parameters with other memory, other settings."""
    twins = Twins(WAYS[way])
    twins.step(3)
    held = [value for state in twins.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert twins.step(without=[0, 4]) == 0
    twins.step(3)
    assert not twins.differ()
    for optimizer in (twins.expected, twins.optimizer):
        for tensor in [t for state in optimizer.state.values() for t in state.values()][:3]:
            tensor.mul_(2)
        optimizer.param_groups[0]["lr"] = 0.02
        with torch.no_grad():
            optimizer.param_groups[0]["params"][1].mul_(2)
        optimizer.param_groups[0]["params"][2].data = optimizer.param_groups[0]["params"][2].data * 2
    twins.step(3)
    assert not twins.differ()
    now = [value for state in twins.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert all(one is other for one, other in zip(held, now, strict=True)), "who holds a state's tensor holds it still"
    for optimizer in (twins.expected, twins.optimizer):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert twins.step(3) == 1
    assert not twins.differ()
    for optimizer in (twins.expected, twins.optimizer):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(64))], "lr": 0.5})
        optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
    twins.step(3)
    assert not twins.differ()


def test_groups_have_blocks_of_their_own() -> None:
    def make(parameters: Any) -> optim.Optimizer:
        held = list(parameters)
        return optim.AdamW([{"params": held[:3]}, {"params": held[3:], "weight_decay": 0.5}], lr=1e-2)

    twins = Twins(make)
    assert twins.step(5) == 2
    assert not twins.differ()


class OwnAdam(optim.Adam):
    """A user's own: what its step does is not known."""


@pytest.mark.parametrize(
    "make",
    [
        OwnAdam,
        partial(optim.Adam, foreach=True),
        partial(optim.Adam, fused=True),
        partial(optim.SGD, lr=0.1),
        optim.Adafactor,
    ],
)
def test_who_is_left_alone(make: Make) -> None:
    twins = Twins(make)
    assert twins.step(4) == 0
    assert not twins.differ()


def test_hooks_are_called_and_schedulers_count(recwarn: pytest.WarningsRecorder) -> None:
    twins = Twins(WAYS["adam"])
    rates = [ExponentialLR(optimizer, 0.5) for optimizer in (twins.expected, twins.optimizer)]
    for _ in range(4):
        assert twins.step() in (0, 1)
        for rate in rates:
            rate.step()
    assert twins.step() == 1
    assert not recwarn.list
    calls: list[int] = []
    hook = twins.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert twins.step(2) == 0
    assert len(calls) == 2
    hook.remove()
    assert twins.step(2) == 1
    own = twins.optimizer.step
    twins.optimizer.step = lambda *a, **k: (calls.append(1), own(*a, **k))[1]  # type: ignore[method-assign]
    assert twins.step(2) == 0
    assert len(calls) == 4
    assert not twins.differ()


def test_parameters_that_share_memory_are_left_alone() -> None:
    memory = torch.randn(128)
    both = [nn.Parameter(memory[:64]), nn.Parameter(memory[32:96]), nn.Parameter(torch.randn(64))]
    optimizer = optim.Adam(both)
    step = FlatStep(optimizer, both)
    for _ in range(3):
        for parameter in both:
            parameter.grad = torch.ones_like(parameter)
        assert not step.prepare()
        step.step()


def test_several_threads_are_left_alone() -> None:
    twins = Twins(WAYS["adam"])
    twins.step(2)
    torch.set_num_threads(2)
    try:
        assert twins.step() == 0
    finally:
        torch.set_num_threads(1)
    assert twins.step() == 1
    assert not twins.differ()


def test_large_parameters_stay_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a block has an end."""
    monkeypatch.setattr(flat, "SMALL", 640)
    monkeypatch.setattr(flat, "LARGEST", 256)
    twins = Twins(WAYS["adam"])
    assert twins.step(4) == 1
    assert [[p.numel() for p in block.parameters] for block in twins.flat._blocks] == [[64, 64]]  # 192, 640, 1024 not
    assert not twins.differ()


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw", "1f1b"])
@pytest.mark.parametrize("more", [{}, {"swap": 0.5}])
def test_pipelines_equal_the_replay(schedule: str, more: dict[str, Any]) -> None:
    options = {"num_batches": 3} if schedule == "pipedream-2bw" else {}
    pipe = check(Case(schedule, "plain", 3, 6, "adamw", num_steps=4, options=options, more=more))
    steps = [step for engine in pipe.engines for step in engine.updater._steps.values()]
    assert len(steps) == 3
    for step in steps:
        blocks = step._blocks if isinstance(step, FlatStep) else []
        assert bool(blocks) is (schedule != "1f1b" and not more)
        assert all(block.is_together for block in blocks)


def test_a_version_is_one_block_of_memory_and_users_keep_their_parameters() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    held = [p for layer in layers for p in layer.parameters()]
    pipe = Pipeline(
        layers, nn.functional.mse_loss, schedule="pipedream", num_microbatches=6, num_ranks=2, optimizer=WAYS["adam"]
    )
    for _ in range(2):
        pipe.train_step(torch.randn(12, 8), torch.randn(12, 8))
    assert all(one is other for one, other in zip(held, pipe.parameters().values(), strict=True))
    storages = {p.untyped_storage().data_ptr() for p in held if p.dim() == 2}
    assert len(storages) == 2, "the weights of each stage lie together"


def _dream() -> Pipeline:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(6)]
    return Pipeline(
        layers, nn.functional.mse_loss, schedule="pipedream", num_microbatches=6, num_ranks=3, optimizer=WAYS["adamw"]
    )


def _train(pipe: Pipeline, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        pipe.train_step(torch.randn(12, 8, generator=generator), torch.randn(12, 8, generator=generator))


def test_a_checkpoint_in_the_middle(tmp_path: Path) -> None:
    """A run that goes on from files and one without a break have the same bits; moves: ``test_runtime_move``."""
    whole, first = _dream(), _dream()
    _train(whole, range(4))
    _train(first, range(2))
    second = _dream()
    for held, after in zip(first.held_layers(), second.held_layers(), strict=True):
        tensors = layer_file.tensors_of(held.module, held.optimizer)
        path = tmp_path / layer_file.name_of(held.layer)
        layer_file.load_into(after.module, after.optimizer, layer_file.read(path, layer_file.write(path, tensors)))
    second.resume(first.num_units, first.num_updates)
    second.step = first.step
    _train(second, range(2, 4))
    assert not differing(second.state_dict(), whole.state_dict())
