"""``pipe.check`` and ``Pipeline(check=N)``: a sound step is equal, and a planted bug is named by layer, tensor and cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from runtime_gloo import Worlds
from torch import Tensor, nn

from vpipe import Layer, Pipeline, UserError
from vpipe.layer import TiedWeight
from vpipe.runtime import region, stage
from vpipe.runtime.split import deferred
from vpipe.runtime.updates import optimizing
from vpipe.runtime.updates.agreement import REST
from vpipe.runtime.updates.update import Updater

X, Y = torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(2))


def layers() -> list[nn.Module]:
    torch.manual_seed(1)
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)) for _ in range(3)]
    return [*blocks, nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8), nn.Linear(8, 8)]


def pipeline(schedule: str = "1f1b", model: Callable[[], Any] = layers, **options: Any) -> Pipeline:
    made = {"optimizer": lambda ps: torch.optim.AdamW(ps, 0.01), "clip_norm": 0.5, "num_ranks": 2} | options
    return Pipeline(model(), nn.functional.mse_loss, schedule=schedule, num_microbatches=4, **made)


def said(pipe: Pipeline) -> str:
    """What a check, or a step that is compared, objects to."""
    step = pipe.train_step if pipe.num_checks else pipe.check
    with pytest.raises(UserError) as caught:
        step(X.clone(), Y)
    pipe.close()
    return str(caught.value)


def test_a_script_checks_a_step_and_trains_on_as_if_it_had_not() -> None:
    pipe, other = pipeline(), pipeline()
    losses = [[], []]
    for step in range(3):
        if step == 1:
            assert pipe.check(X, Y).startswith("equal to one process to the bit: ")
        for found, each in zip(losses, (pipe, other), strict=True):
            found.append(each.train_step(X.clone(), Y))
    assert losses[0] == losses[1]
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in pipe.state_dict().items())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved", "chimera", "pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("options", [{}, {"recompute": 1.0}, {"num_ranks": 4, "replicas": 2}])
def test_sound_steps_are_equal_with_their_updates(schedule: str, options: dict[str, Any]) -> None:
    if schedule.startswith("pipedream"):
        options = {}
    pipe = pipeline(schedule, check=2, **options)
    for _ in range(3):
        pipe.train_step(X.clone(), Y)
    assert pipe.checked
    assert not pipe.num_checks
    pipe.close()


def test_a_model_that_is_not_trained_is_checked() -> None:
    frozen = [module.requires_grad_(False) for module in layers()]
    for options in ({"optimizer": None, "clip_norm": None}, {"check": 1}):
        pipe = pipeline(model=lambda: frozen, **options)
        assert pipe.check(X, Y)
        if options.get("check"):
            pipe.train_step(X, Y)


def test_gradients_that_wait_stay_and_what_accumulates_is_compared() -> None:
    pipe = pipeline(check=1)
    pipe.train_step(X.clone(), Y, update=False, weight=0.5)
    before = {name: gradient.clone() for name, gradient in pipe.gradients().items()}
    pipe.check(X, Y)
    assert pipe.gradients().keys() == before.keys()
    assert all(torch.equal(gradient, before[name]) for name, gradient in pipe.gradients().items())


class Counted(nn.Module):
    """Keeps something between units that is neither a buffer nor a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.before = nn.Linear(8, 8), [0.0]

    def forward(self, x: Tensor) -> Tensor:
        here, self.before[0] = self.before[0], float(x.detach().mean())
        return self.linear(x) + here


def with_a(kind: type[nn.Module]) -> list[nn.Module]:
    made = layers()
    made[2] = kind()
    return made


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Counted, "what layer 2 (Counted) gives for unit 0 when it is computed again differs"),
    ],
)
def test_a_model_that_cannot_be_equal_is_named(kind: type[nn.Module], words: str) -> None:
    assert words in said(pipeline(model=lambda: with_a(kind), recompute=1.0))


def test_asynchronous_schedules_compare_the_next_step() -> None:
    assert "give Pipeline(check=1)" in said(pipeline("pipedream"))


def _other_seed(seed: int, microbatch: int, layer: int) -> None:
    torch.manual_seed(microbatch)


@pytest.mark.parametrize(
    ("plant", "options", "words"),
    [
        (
            lambda patch: patch.setattr(region.Region, "_loss", lambda self, loss, outputs: loss(outputs[0]) * 1.5),
            {},
            "the loss differs",
        ),
        (
            lambda patch: patch.setattr(stage, "_cut_off", lambda given, chosen: {k: given[k] * 1.001 for k in chosen}),
            {"recompute": {1}, "partition": [3, 3]},
            "what layer 1 (Sequential) takes of unit 0 differs",
        ),
        (
            lambda patch: patch.setattr(deferred.WeightQueue, "run", lambda self, microbatch: None),
            {"schedule": "zb-h1"},
            "the gradient bias of layer 5 (Linear) differs",
        ),
        (
            lambda patch: patch.setattr(optimizing, "step", lambda optimizer: (optimizer.step(), optimizer.step())),
            {"check": 1},
            "the weight 0.weight of layer 0 (Sequential) differs",
        ),
        (
            lambda patch: patch.setattr(Updater, "_verdict_of", lambda *_: (True, {REST: torch.tensor(0.25)})),
            {"check": 1},
            "the gradient bias of layer 5 (Linear) differs",
        ),
    ],
    ids=["loss", "recompute", "split", "optimizer", "clip"],
)
def test_a_planted_bug_is_named(
    plant: Callable[[pytest.MonkeyPatch], None], options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipeline(**options)
    plant(monkeypatch)
    assert words in said(pipe)


def check_in_a_process(planted: bool) -> str:
    """Every rank of a process group: its layers come from factories, and rank 0 holds a part of them."""
    torch.manual_seed(1)
    made = [Layer(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))) for _ in range(6)]
    pipe = pipeline(model=lambda: made, check=1, tied=[TiedWeight(((0, "0.weight"), (5, "0.weight")))])
    pipe.train_step(X.clone(), Y)
    if planted and pipe.is_last:
        module = pipe.modules()[4]
        forward, module.forward = module.forward, lambda x: forward(x) * 1.5
    try:
        return pipe.check(X, Y)
    except UserError as error:
        return str(error)
    finally:
        pipe.close()


def test_ranks_in_processes_are_compared_on_the_leader(worlds: Worlds) -> None:
    first, second = worlds.run(2, check_in_a_process, False)
    assert first == second
    assert first.startswith("equal to one process to the bit")
    told = worlds.run(2, check_in_a_process, True)
    assert "what layer 4 (Sequential) gives for unit 0 differs" in told[0]
    assert told[0] == told[1]
