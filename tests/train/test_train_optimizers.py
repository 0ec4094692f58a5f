"""An optimizer of a user's own: registered by a plugin, named in a config, its state of any shape in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from train_runs import Run, equal, run, tiny

from vpipe.config.sections import TrainingConfig
from vpipe.errors import UserError
from vpipe.registry import OPTIMIZER_REGISTRY
from vpipe.runtime.moves import layer_state
from vpipe.runtime.moves.state_paths import flatten, unflatten
from vpipe.runtime.updates.optimizing import OPTIONS, set_rate
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


def test_what_an_optimizer_keeps_on_the_host_stays_there_wherever_its_layer_goes() -> None:
    """A move and a checkpoint had rules of their own: one kept it there, the other put it beside the weights."""
    layer = nn.Linear(2, 2, bias=False, device="meta")
    own = {"step": torch.tensor(3.0), "table": torch.ones(2), "sum": torch.empty(2, 2, device="meta"), "seen": 4}
    kept = SimpleNamespace(state={layer.weight: own}, param_groups=[{"params": [layer.weight]}])
    tensors = layer_state.tensors_of(layer, kept)
    paths = {key.removeprefix("optimizer/weight/") for key in tensors if key.startswith("optimizer/")}
    assert paths == {"step", "table:host", "sum", "seen:int"}
    fresh = SimpleNamespace(state={}, param_groups=kept.param_groups)
    layer_state.load_states(layer, fresh, tensors)
    found = fresh.state[layer.weight]
    assert {name: str(value.device) for name, value in found.items() if name != "seen"} == {
        "step": "cpu", "table": "cpu", "sum": "meta"
    }  # fmt: skip
    assert found["seen"] == 4
    older = {key.removesuffix(":host"): tensor for key, tensor in tensors.items()}
    layer_state.load_states(layer, fresh, older)
    assert str(fresh.state[layer.weight]["table"].device) == "meta", "a checkpoint of before says nothing of it"


GROUPS = {
    "training.optimizer": "adamw",
    "training.weight_decay": 0.1,
    "training.learning_rate_policy": "linear",
    "training.parameter_groups": [
        {"match": "vectors", "weight_decay": 0},
        {"match": "0.*|1.*", "learning_rate": 0.1},
        {"match": "2.feed_forward.*", "frozen": True},
    ],
}


def settings(found: Run) -> dict[str, tuple[float, float]]:
    """Name → weight decay, rate."""
    pipeline = found.trainer.session.pipeline
    names = {id(parameter): name for name, parameter in pipeline.parameters().items()}
    groups = [group for made in pipeline.optimizers.values() for group in made.param_groups]
    return {names[id(p)]: (group["weight_decay"], group["lr"]) for group in groups for p in group["params"]}


def test_groups_have_what_they_say_on_every_cut_and_after_a_resume(tmp_path: Path) -> None:
    before = Run(tiny(GROUPS), tmp_path / "whole")
    first = {name: weight.clone() for name, weight in before.weights.items()}
    whole = before.train()
    last = 0.01 * 1 / 8
    for name, (decay, rate) in settings(whole).items():
        vector, early = first[name].dim() < 2, name[:2] in ("0.", "1.")
        assert decay == (0 if vector else 0.1), name
        assert rate == pytest.approx(last * (0.1 if early else 1)), name
        assert torch.equal(first[name], whole.weights[name]) == name.startswith("2.feed_forward."), name
    alone = run(tiny(GROUPS | {"parallel.model_parallel_size": 1}), tmp_path / "alone")
    assert equal(whole.weights, alone.weights)
    cut = {"parallel.partition": [3, 1], "checkpoint.interval": 3}
    half = run(tiny(GROUPS | cut), tmp_path / "half")
    assert "has changed" not in half.said
    rest = run(tiny(GROUPS), tmp_path / "rest", tmp_path / "half" / "checkpoints" / "iteration-000006")
    assert equal(whole.weights, rest.weights)
    moved = Run(tiny(GROUPS), tmp_path / "moved")
    pipeline = moved.trainer.session.pipeline
    moves = iter([pipeline.layout.with_counts([3, 1]), pipeline.layout.with_counts([1, 3])])
    moved.trainer.updated = lambda: next((pipeline.move(layout) for layout in moves), None)
    assert equal(whole.weights, moved.train().weights)


@pytest.mark.parametrize("name", ["adafactor", "lamb", "lars", "sgd"])
def test_an_optimizer_is_the_same_on_every_cut_and_after_resumes_and_moves(name: str, tmp_path: Path) -> None:
    job = {"training.optimizer": name, "checkpoint.interval": 3}
    whole = run(tiny(job), tmp_path / "whole")
    assert equal(whole.weights, run(tiny(job | {"parallel.model_parallel_size": 1}), tmp_path / "alone").weights)
    half = tmp_path / "whole" / "checkpoints" / "iteration-000006"
    assert equal(whole.weights, run(tiny(job | {"parallel.partition": [3, 1]}), tmp_path / "rest", half).weights)
    moved = Run(tiny(job), tmp_path / "moved")
    pipeline = moved.trainer.session.pipeline
    moves = iter([pipeline.layout.with_counts([3, 1]), pipeline.layout.with_counts([1, 3])])
    moved.trainer.updated = lambda: next((pipeline.move(layout) for layout in moves), None)
    assert equal(whole.weights, moved.train().weights)


def test_a_tied_weight_is_in_the_groups_of_its_first_owner(tmp_path: Path) -> None:
    tied = {"model.extra": {"tied": True}, "training.parameter_groups": [{"match": "0.*", "learning_rate": 0.1}]}
    found = run(tiny({"training.optimizer": "adamw"} | tied), tmp_path)
    (weight,) = found.trainer.session.pipeline.builder.parts.tied
    rates = settings(found)
    assert [rates[f"{layer}.{name}"][1] for layer, name in weight.owners] == pytest.approx([0.001, 0.001])
    assert rates["1.attention.qkv.weight"][1] == 0.01


def test_groups_are_those_of_torch() -> None:
    """By hand beside the config's."""
    torch.manual_seed(0)
    mine, theirs = ([nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))] for _ in range(2))
    setattr(mine[1], OPTIONS, {"weight_decay": 0, "learning_rate": 0.5})
    made = optimizer(TrainingConfig(optimizer="adamw", weight_decay=0.3, learning_rate=0.1))(mine)
    other = torch.optim.AdamW(
        [{"params": theirs[:1]}, {"params": theirs[1:], "weight_decay": 0.0, "lr": 0.05}], lr=0.1, weight_decay=0.3
    )
    for step in range(3):
        for one, two in zip(mine, theirs, strict=True):
            one.grad = two.grad = torch.randn(one.shape)
        set_rate(made, 0.1 / (step + 1))
        other.param_groups[0]["lr"], other.param_groups[1]["lr"] = 0.1 / (step + 1), 0.05 / (step + 1)
        made.step()
        other.step()
    assert all(torch.equal(one, two) for one, two in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("part", [0.0, 0.25])
def test_groups_of_a_users_optimizer_keep_their_rates(part: float, tmp_path: Path) -> None:
    @OPTIMIZER_REGISTRY.register("decayed")
    def decayed(params: Any, lr: float, **more: Any) -> torch.optim.Optimizer:
        held = list(params)
        vectors = {"params": [p for p in held if p.ndim < 2], "lr": lr * part}
        return torch.optim.SGD([{"params": [p for p in held if p.ndim > 1]}, vectors], lr=lr)

    found = run(tiny({"training.optimizer": "decayed", "training.learning_rate_policy": "linear"}), tmp_path)
    for made in found.trainer.session.pipeline.optimizers.values():
        assert [group["lr"] for group in made.param_groups] == pytest.approx([0.01 / 8, part * 0.01 / 8])


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (
            {"match": "9.*", "weight_decay": 0},
            r"parameter_groups\[0\] matches no parameter with '9.\*'; they are called 0.",
        ),
        ({"match": "1.*", "weight_dcay": 0}, "has weight_dcay, which the optimizer adam does not take; did you mean"),
        ({"match": "1.*"}, "must have match, a pattern of names, and what is otherwise"),
        ({"match": "1.*", "lr": 1}, "must have match"),
        ({"weight_decay": 1}, "must have match"),
        ({"match": "1.*", "learning_rate": -1}, "which must be a part of that of all"),
        ({"match": "1.*", "frozen": "yes"}, "which must be true, false or a number of iterations"),
        ({"match": "1.*", "layer_decay": 1.5}, "has layer_decay 1.5, which must be a number above 0, at most 1"),
        ({"match": "1.*", "gradient_clipping": 0}, "has gradient_clipping 0, which must be a number above 0"),
    ],
    ids=str,
)
def test_groups_that_are_wrong_are_refused(group: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        Run(tiny({"training.parameter_groups": [group]}), tmp_path)
