"""The checker is checked: ``Replay`` equals a training loop that anybody would write, with nothing of vpipe in it."""

from __future__ import annotations

import copy

import pytest
import torch
from runtime_models import WIDTH, build
from runtime_support import OPTIMIZERS, Case, check, differing, modules_of, pipeline, replay_of, units_of
from torch import nn

from vpipe import Layer, Pipeline


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model_name", ["plain", "batch_norm", "convolution"])
def test_replay_is_plain_training(model_name: str, optimizer: str) -> None:
    case = Case("1f1b", model_name, 2, 4, optimizer, dropout=0.0, clip_norm=0.5)
    model = build(model_name, 10, 0.0)
    plain = nn.Sequential(*copy.deepcopy(model.layers))
    modules = modules_of(model)
    pipe = pipeline(case, model, 2)
    replay = replay_of(pipe, modules, case, model)
    update = OPTIMIZERS[optimizer](plain.parameters())
    for step in range(3):
        inputs, targets = model.data(8, step)
        losses = []
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            loss = model.loss(plain(x), y)
            (loss / 4).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        update.step()
        update.zero_grad()
        program = pipe.programs.training()
        assert replay.run(program, units_of(pipe, program, inputs, targets)) == sum(loss * 0.25 for loss in losses)
        assert pipe.train_step(inputs, targets) == sum(loss * 0.25 for loss in losses)
    assert not differing(replay.state_dict(), dict(plain.state_dict()))
    assert not differing(pipe.state_dict(), dict(plain.state_dict()))


class Once(nn.Module):
    """Reads each value once."""

    def __init__(self, num_values: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_values))

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(value) for part, value in zip(self.parts, values, strict=True)]).sum(0).tanh()


@pytest.mark.parametrize(
    "partition", [[6], [1, 5], [2, 4], [5, 1], [1, 1, 4], [2, 2, 2], [1, 1, 1, 1, 1, 1], [3, 1, 2]]
)
def test_skips_equal_plain_autograd_whatever_the_partition(partition: list[int]) -> None:
    torch.manual_seed(0)
    first, second, third, fourth, fifth, last = nn.Linear(WIDTH, WIDTH), Once(1), Once(2), Once(2), Once(3), Once(4)
    layers = [
        Layer(first, reads=("image",), writes=("a",)),
        Layer(second, reads=("a",), writes=("b",)),
        Layer(third, reads=("b", "a"), writes=("x",)),
        Layer(fourth, reads=("x", "a"), writes=("x",)),
        Layer(fifth, reads=("x", "b", "a"), writes=("x",)),
        Layer(last, reads=("x", "a", "b", "image"), writes=("x",)),
    ]
    modules = [copy.deepcopy(layer.module) for layer in layers]
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)

    a = modules[0](x)
    b = modules[1](a)
    c = modules[2](b, a)
    d = modules[3](c, a)
    e = modules[4](d, b, a)
    nn.functional.mse_loss(modules[5](e, a, b, x), y).backward()

    pipe = Pipeline(
        layers,
        nn.functional.mse_loss,
        schedule="1f1b",
        num_microbatches=1,
        num_ranks=len(partition),
        partition=partition,
    )
    pipe.train_step({"image": x}, y, update=False)
    expected = {
        f"{number}.{name}": p.grad for number, module in enumerate(modules) for name, p in module.named_parameters()
    }
    assert not differing(pipe.gradients(), expected)


def test_partition_changes_no_bit() -> None:
    """Readers that use a value twice: the sum is taken reader by reader on every partition."""
    states = []
    for partition in ([10], [1, 9], [4, 6], [2, 2, 6], [1] * 10, [3, 3, 4]):
        pipe = check(Case("1f1b", "skips", len(partition), 3, more={"partition": partition}))
        states.append({name: tensor.clone() for name, tensor in pipe.state_dict().items()})
    assert all(not differing(state, states[0]) for state in states)
