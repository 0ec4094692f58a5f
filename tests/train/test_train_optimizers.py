"""An optimizer of a user's own: registered by a plugin, named in a config, its state of any shape in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_runs import Run, equal, run, tiny

from vpipe.config.sections import TrainingConfig
from vpipe.errors import UserError
from vpipe.registry import OPTIMIZER_REGISTRY
from vpipe.train.checkpoints.layer_file import flatten, unflatten
from vpipe.train.optimizers import optimizer


class Remembering(torch.optim.Optimizer):
    """Steps by the mean of the last gradients, in a state that no optimizer of torch has."""

    def __init__(self, params: Any, lr: float = 0.1, last: int = 2) -> None:
        super().__init__(params, {"lr": lr, "last": last})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.setdefault("past", []).append(parameter.grad.clone())
                del state["past"][: -group["last"]]
                state["seen"] = state.get("seen", 0) + 1
                state["notes"] = {"parity": ("odd", "even")[state["seen"] % 2], 7: (0.1 * state["seen"], None, True)}
                assert isinstance(state["seen"], int)
                parameter.sub_(torch.stack(state["past"]).mean(0) * group["lr"] / (1 + state["notes"][7][0]))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    before = dict(OPTIMIZER_REGISTRY._entries)
    OPTIMIZER_REGISTRY.register("remembering")(Remembering)
    yield
    OPTIMIZER_REGISTRY._entries.clear()
    OPTIMIZER_REGISTRY._entries.update(before)


MINE = {"training.optimizer": "remembering", "training.optimizer_options": {"last": 3}, "checkpoint.interval": 3}


def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = run(tiny(MINE), tmp_path / "whole")
    first = Run(tiny(MINE | {"training.max_iterations": 3}), tmp_path / "half")
    first.trainer.run()
    rest = Run(tiny(MINE), tmp_path / "rest")
    rest.trainer.resume(tmp_path / "half")
    for made in rest.trainer.session.pipeline.optimizers.values():
        for state in made.state.values():
            assert (state["seen"], len(state["past"])) == (3, 3)
            assert state["notes"] == {"parity": "even", 7: (0.1 * 3, None, True)}
    rest.trainer.run()
    assert equal(whole.weights, rest.weights)


STATES: list[dict[Any, Any]] = [
    {},
    {"exp_avg": torch.ones(2), "step": torch.tensor(3.0)},
    {"a": 1, "b": 0.1, "c": True, "d": None, "e": "words: and/more ü", "f": ""},
    {"none": [], "at": {}, "all": ()},
    {"deep": [{"x": (torch.arange(3), [None, {"y": "z"}])}, 2], 5: {"[0]": 1, "(1)": 2, "a:int": 3}},
]


@pytest.mark.parametrize("state", STATES, ids=str)
def test_any_state_comes_back(state: dict[Any, Any]) -> None:
    found = unflatten(flatten(state, "it"))
    torch.testing.assert_close(_told(found), _told(state), rtol=0, atol=0)
    assert str(found) == str(state)


def _told(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def test_names_of_torchs_own_stay_as_they_were() -> None:
    weight = nn.Parameter(torch.ones(2))
    adam = torch.optim.Adam([weight])
    weight.grad = torch.ones(2)
    adam.step()
    assert set(flatten(adam.state[weight], "Adam")) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("state", "words"),
    [({"a": object()}, "keeps a object in its state (a)"), ({(1, 2): 3}, "keeps its state under (1, 2), a tuple")],
)
def test_what_no_file_can_hold_is_told(state: dict[Any, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        flatten(state, "Odd")
    assert f"Odd {words}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "remembring"}, "there is no optimizer 'remembring'; did you mean 'remembering'?"),
        ({"optimizer": "remembering", "optimizer_options": {"rank": 4}}, "optimizer remembering does not take"),
        ({"optimizer": "adam", "optimizer_options": {"nesterov": True}}, "change training.optimizer_options"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        optimizer(TrainingConfig(**changes))([nn.Parameter(torch.zeros(1))])
    assert words in str(caught.value)


def test_what_stands_in_the_groups_is_warned_of(tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            self.param_groups[0]["dampening"] += 1

    OPTIMIZER_REGISTRY.register("counting")(Counting)
    done = run(tiny({"training.optimizer": "counting", "checkpoint.interval": 3}), tmp_path)
    assert "Counting has changed dampening of its parameter groups" in done.said
