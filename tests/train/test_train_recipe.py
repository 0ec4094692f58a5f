"""The recipe beside plain torch, by hand: averages of weights, what is frozen until an iteration, rates of layers, clipping by
groups, LAMB and LARS, the best checkpoint and the end of a run that gets no better."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from train_runs import Run, equal, run, tiny

from vpipe import Pipeline
from vpipe.config import PipelineConfig
from vpipe.config.checks import idle_keys
from vpipe.config.sections import TrainingConfig
from vpipe.errors import UserError
from vpipe.rundir.lineage import Line
from vpipe.rundir.manifest import Best, CheckpointManifest, Standing
from vpipe.runtime.updates.averages import AVERAGE, averaged, averaging
from vpipe.runtime.updates.update import LossScale
from vpipe.train.checkpoints.export import WEIGHTS, export
from vpipe.train.checkpoints.writer import CheckpointPlace, Save, Saver
from vpipe.train.groups import described
from vpipe.train.optimizers import optimizer

DECAY = 0.9
EMA = {"training.ema": DECAY, "checkpoint.interval": 3, "checkpoint.keep": 9}


def averages(made: Run) -> dict[str, Tensor]:
    found = {}
    for held in made.trainer.session.pipeline.held_layers():
        assert held.optimizer is not None
        for name, parameter in held.module.named_parameters():
            if AVERAGE in (state := held.optimizer.state.get(parameter, {})):
                found[f"{held.layer}.{name}"] = state[AVERAGE].clone()
    return found


class ByHand:
    """What torch's own averages of a run are: its weights are told to them after every update of a stage."""

    def __init__(self, made: Run) -> None:
        pipeline = made.trainer.session.pipeline
        self._models: list[tuple[list[str], AveragedModel]] = []
        for stage, stepped in pipeline.optimizers.items():
            layers = range(*pipeline.layout.bounds[stage])
            mine = {name: p for name, p in pipeline.parameters().items() if int(name.split(".")[0]) in layers}
            weights = nn.ParameterList(mine.values())  # a module's own may be those of an older version just then
            model = AveragedModel(weights, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
            model.update_parameters(weights)
            stepped.register_step_post_hook(lambda *_, model=model, weights=weights: model.update_parameters(weights))
            self._models.append((list(mine), model))

    def weights(self) -> dict[str, Tensor]:
        return {
            name: parameter.detach()
            for names, model in self._models
            for name, parameter in zip(names, model.module.parameters(), strict=True)
        }


@pytest.mark.parametrize("name", ["sgd", "adam", "adafactor", "lamb", "lars"])
@pytest.mark.parametrize("scheduler", ["1f1b", "pipedream", "pipedream-2bw", "zb-h1"])
def test_averages_are_torchs(scheduler: str, name: str, tmp_path: Path) -> None:
    made = Run(tiny(EMA | {"parallel.scheduler": scheduler, "training.optimizer": name}), tmp_path / "run")
    by_hand = ByHand(made)
    made.train()
    assert equal(averages(made), by_hand.weights())
    assert not equal(averages(made), made.weights)
    plain = run(
        tiny({"parallel.scheduler": scheduler, "training.optimizer": name, "checkpoint.interval": 3}),
        tmp_path / "plain",
    )
    assert equal(made.weights, plain.weights), "an average changes nothing of the training"


def test_an_update_that_is_skipped_is_none_of_the_average(tmp_path: Path) -> None:
    made = Run(tiny(EMA), tmp_path)
    by_hand = ByHand(made)
    times = iter([False] * 9 + [True] + [False] * 1000)
    parameter = next(made.trainer.session.pipeline.modules()[1].parameters())
    parameter.register_hook(lambda gradient: gradient * float("nan") if next(times) else gradient)
    made.train()
    assert made.lines[-1]["skipped"] == 1
    assert equal(averages(made), by_hand.weights())


def test_averages_are_the_same_on_every_cut_and_after_resumes_and_moves(tmp_path: Path) -> None:
    whole = run(tiny(EMA), tmp_path / "whole")
    alone = run(tiny(EMA | {"parallel.model_parallel_size": 1}), tmp_path / "alone")
    twice = run(tiny(EMA | {"parallel.data_parallel_size": 2, "dataset.batch_size": 4}), tmp_path / "twice")
    half = tmp_path / "whole" / "checkpoints" / "iteration-000006"
    rest = run(tiny(EMA | {"parallel.partition": [3, 1]}), tmp_path / "rest", half)
    moved = Run(tiny(EMA), tmp_path / "moved")
    pipeline = moved.trainer.session.pipeline
    moves = iter([pipeline.layout.with_counts([3, 1]), pipeline.layout.with_counts([1, 3])])
    moved.trainer.updated = lambda: next((pipeline.move(layout) for layout in moves), None)
    moved.train()
    for found in (alone, rest, moved):
        assert equal(averages(whole), averages(found))
    assert averages(twice).keys() == averages(whole).keys()
    back = run(tiny(EMA | {"training.ema": 0.0}), tmp_path / "back", half)
    assert not averages(back)
    assert equal(back.weights, whole.weights)


def test_evaluations_and_exports_take_the_averages(tmp_path: Path) -> None:
    job = EMA | {"training.evaluation_interval": 4, "checkpoint.interval": 4}
    made = run(tiny(job), tmp_path / "run")
    pipeline, evaluation = made.trainer.session.pipeline, made.trainer.evaluation
    (loss,) = [line["loss"] for line in made.metrics if line["kind"] == "evaluation" and line["iteration"] == 8]
    before = made.weights
    with averaged(pipeline):
        assert equal({name: p.detach() for name, p in pipeline.parameters().items()}, averages(made))
    assert equal(made.weights, before)
    plain = run(tiny(job | {"training.ema": 0.0}), tmp_path / "plain")
    (trained,) = [line["loss"] for line in plain.metrics if line["kind"] == "evaluation" and line["iteration"] == 8]
    assert loss != trained
    found = {}
    for name, told in {"average": False, "trained": True}.items():
        export(tmp_path / "run", tmp_path / name, trained=told)
        found[name] = load_file(tmp_path / name / WEIGHTS)
    assert equal(found["trained"], before)
    assert equal({name: found["average"][name] for name in averages(made)}, averages(made))
    pipeline.load_state_dict(found["average"])
    for held in pipeline.held_layers():
        assert held.optimizer is not None
        held.optimizer.state.clear()
    assert evaluation is not None
    assert evaluation.run() == loss


def test_the_api_has_averages_too() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    make = averaging(lambda parameters: torch.optim.SGD(parameters, lr=0.1), 0.5)
    pipe = Pipeline(layers, nn.functional.mse_loss, num_ranks=2, num_microbatches=2, optimizer=make)
    first = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    pipe.train_step(torch.randn(4, 4), torch.randn(4, 4))
    trained = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    with averaged(pipe):
        assert equal(pipe.state_dict(), {name: first[name].lerp(trained[name], 0.5) for name in first})
    assert equal(pipe.state_dict(), trained)
    pipe.close()


@pytest.mark.parametrize("scheduler", ["1f1b", "pipedream", "zb-h1"])
def test_what_is_frozen_until_an_iteration_trains_from_then_on(scheduler: str, tmp_path: Path) -> None:
    job = {
        "training.parameter_groups": [{"match": "0.*|2.attention.*", "frozen": 5}, {"match": "3.*", "frozen": True}],
        "checkpoint.interval": 2,
        "checkpoint.keep": 9,
        "training.optimizer": "adamw",
        "training.weight_decay": 0.1,
        "parallel.scheduler": scheduler,
    }
    made = Run(tiny(job), tmp_path / "whole")
    first, seen = made.weights, {}
    made.trainer.updated = lambda: seen.update({made.trainer.iteration: made.weights})
    made.train()
    thawing = [name for name in first if name.startswith(("0.", "2.attention."))]
    for iteration, weights in seen.items():
        changed = [name for name in thawing if not torch.equal(weights[name], first[name])]
        assert changed == (thawing if iteration > 5 else []), iteration
    assert all(torch.equal(first[name], made.weights[name]) == name.startswith("3.") for name in first)
    for iteration in (4, 6):
        half = tmp_path / "whole" / "checkpoints" / f"iteration-{iteration:06d}"
        assert equal(made.weights, run(tiny(job), tmp_path / f"rest{iteration}", half).weights)
    if scheduler != "pipedream":
        alone = run(tiny(job | {"parallel.model_parallel_size": 1, "parallel.scheduler": "1f1b"}), tmp_path / "alone")
        assert equal(made.weights, alone.weights)


def test_what_is_accumulated_thaws_where_an_update_begins(tmp_path: Path) -> None:
    job = {"training.parameter_groups": [{"match": "0.*", "frozen": 3}], "training.gradient_accumulation": 2}
    made = Run(tiny(job), tmp_path)
    first, seen = made.weights, {}
    made.trainer.updated = lambda: seen.update({made.trainer.iteration: made.weights})
    made.train()
    changed = [
        iteration
        for iteration, weights in seen.items()
        if not torch.equal(weights["0.tokens.weight"], first["0.tokens.weight"])
    ]
    assert changed == [6, 8]


def test_a_run_that_goes_back_is_frozen_again(tmp_path: Path) -> None:
    job = {
        "training.parameter_groups": [{"match": "0.*", "frozen": 4}],
        "checkpoint.interval": 3,
        "training.on_nan": "roll-back",
        "training.nan_limit": 1,
    }
    made = Run(tiny(job), tmp_path)
    trainer = made.trainer
    first, seen = made.weights, []
    weight, pipeline = "0.tokens.weight", trainer.session.pipeline
    kept = pipeline.optimizers[0].state

    def look() -> None:
        state = bool(kept.get(pipeline.parameters()[weight]))
        seen.append((trainer.iteration, state, not torch.equal(made.weights[weight], first[weight])))

    trainer.updated = look
    parameter = next(pipeline.modules()[2].parameters())
    parameter.register_hook(lambda g: g * float("nan") if trainer.iteration == 5 and trainer.lowered == 1 else g)
    made.train()
    told = [iteration for iteration, _, _ in seen]
    assert told == [1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8]
    assert [iteration for iteration, state, _ in seen if state] == [5, 5, 6, 7, 8]
    assert [iteration for iteration, _, changed in seen if changed] == [5, 5, 6, 7, 8]


def test_rates_of_layers_and_what_is_told_of_them(tmp_path: Path) -> None:
    groups: list[dict[str, Any]] = [
        {"match": "*", "layer_decay": 0.5},
        {"match": "vectors", "weight_decay": 0},
        {"match": "0.*", "frozen": 7},
        {"match": "3.*", "learning_rate": 0.1, "gradient_clipping": 0.3},
    ]
    made = run(tiny({"training.parameter_groups": groups, "training.optimizer": "adamw"}), tmp_path)
    pipeline = made.trainer.session.pipeline
    for made_by in pipeline.optimizers.values():
        for group in made_by.param_groups:
            for parameter in group["params"]:
                (layer,) = {int(name.split(".")[0]) for name, p in pipeline.parameters().items() if p is parameter}
                assert group["lr"] == pytest.approx(0.01 * 0.5 ** (3 - layer) * (0.1 if layer == 3 else 1))
    told = described(made.trainer.session.skeleton)
    assert len(told) == 7  # layer 0 has no vectors
    assert any(line.startswith("frozen: 7, learning_rate: 0.125: 0.") for line in told)
    assert any(line.startswith("gradient_clipping: 0.3, learning_rate: 0.1, weight_decay: 0: 3.") for line in told)


CLIPPED = [{"match": "vectors", "gradient_clipping": 0.05}, {"match": "1.attention.*", "gradient_clipping": 0.1}]


@pytest.mark.parametrize("rest", [0.0, 0.2])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("scheduler", ["1f1b", "zb-h2", "pipedream"])
def test_groups_are_clipped_by_their_own_norms(scheduler: str, stages: int, rest: float, tmp_path: Path) -> None:
    """The gradients that optimizers get beside torch's ``clip_grad_norm_`` of those that an unclipped run gives them."""
    job = {
        "training.optimizer": "sgd",
        "training.max_iterations": 1,
        "parallel.scheduler": scheduler,
        "parallel.model_parallel_size": stages,
    }
    if scheduler == "pipedream":
        job["parallel.schedule_options"] = {"update_interval": 4}
    own = {"training.parameter_groups": CLIPPED, "training.gradient_clipping": rest}
    plain, clipped = (Run(tiny(each), tmp_path / name) for name, each in {"plain": job, "clipped": job | own}.items())
    gradients: list[dict[str, Tensor]] = []
    for made in (plain, clipped):
        found: dict[str, Tensor] = {}
        gradients.append(found)
        names = {id(p): name for name, p in made.trainer.session.pipeline.parameters().items()}
        for stepped in made.trainer.session.pipeline.optimizers.values():
            stepped.register_step_pre_hook(_noting(names, found))
        made.train()
    expected, got = gradients
    pipeline = plain.trainer.session.pipeline
    bounds = pipeline.layout.bounds if scheduler == "pipedream" else [(0, 4)]
    for begin, end in bounds:
        groups: dict[float, list[Tensor]] = {}
        for name, gradient in expected.items():
            if begin <= int(name.split(".")[0]) < end:
                most = 0.1 if name.startswith("1.attention.") else 0.05 if gradient.dim() < 2 else rest
                groups.setdefault(most, []).append(gradient)
        for most, members in groups.items():
            if most:
                nn.utils.clip_grads_with_norm_(_holders(members), most, nn.utils.get_total_norm(members))
    assert equal(expected, got)
    assert plain.lines[-1]["gradient_norm"] == clipped.lines[-1]["gradient_norm"]


def _noting(names: dict[int, str], found: dict[str, Tensor]) -> Callable[..., None]:
    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            found.update({names[id(p)]: p.grad.clone() for p in group["params"] if p.grad is not None})

    return note


def _holders(gradients: list[Tensor]) -> list[Tensor]:
    made = []
    for gradient in gradients:
        made.append(torch.zeros_like(gradient))
        made[-1].grad = gradient
    return made


def test_a_group_that_is_clipped_is_the_same_on_every_cut_and_after_a_move(tmp_path: Path) -> None:
    job = {"training.parameter_groups": CLIPPED, "training.optimizer": "sgd"}
    whole = run(tiny(job), tmp_path / "whole")
    assert not equal(whole.weights, run(tiny({"training.optimizer": "sgd"}), tmp_path / "plain").weights)
    for number, cut in enumerate([{"parallel.model_parallel_size": 1}, {"parallel.scheduler": "zb-h2"}]):
        assert equal(whole.weights, run(tiny(job | cut), tmp_path / str(number)).weights), cut
    for number, replicas in enumerate([1, 2]):
        both = job | {"parallel.data_parallel_size": replicas}
        moved, stays = Run(tiny(both), tmp_path / f"moved{number}"), run(tiny(both), tmp_path / f"stays{number}")
        pipeline = moved.trainer.session.pipeline
        moves = iter([pipeline.layout.with_counts([3, 1]), pipeline.layout.with_counts([1, 3])])
        moved.trainer.updated = lambda pipeline=pipeline, moves=moves: next(
            (pipeline.move(layout) for layout in moves), None
        )  # type: ignore[misc]
        assert equal(stays.weights, moved.train().weights)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("as_apex", [False, True])
def test_lamb_is_that_of_the_paper_or_of_apex(as_apex: bool, decay: float) -> None:
    """Written down from Algorithm 2 of arXiv:1904.00962, and from csrc/multi_tensor_lamb.cu."""
    torch.manual_seed(0)
    x = torch.randn(5, 3, dtype=torch.float64)
    weight = nn.Parameter(x.clone())
    made = optimizer(
        TrainingConfig(optimizer="lamb", learning_rate=0.1, weight_decay=decay, optimizer_options={"as_apex": as_apex})
    )([weight])
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for t in range(1, 5):
        weight.grad = torch.randn(5, 3, dtype=torch.float64)
        m = 0.9 * m + 0.1 * weight.grad
        v = 0.999 * v + 0.001 * weight.grad**2
        r = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8) + decay * x
        x = x - 0.1 * (1 if as_apex and not decay else x.norm() / r.norm()) * r
        made.step()
    torch.testing.assert_close(weight.detach(), x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("trust", [0.02, 0.0])
def test_lars_is_that_of_the_paper(trust: float) -> None:
    """Algorithm 1 of arXiv:1708.03888; without trust torch's momentum, with the rate inside."""
    torch.manual_seed(0)
    x, v = torch.randn(5, 3, dtype=torch.float64), torch.zeros(5, 3, dtype=torch.float64)
    weight, still = nn.Parameter(x.clone()), nn.Parameter(torch.zeros(2))
    made = optimizer(
        TrainingConfig(optimizer="lars", learning_rate=0.1, weight_decay=0.01, optimizer_options={"trust": trust})
    )([weight, still])
    for _ in range(4):
        weight.grad, still.grad = torch.randn(5, 3, dtype=torch.float64), torch.ones(2)
        local = trust * x.norm() / (weight.grad.norm() + 0.01 * x.norm()) if trust else 1.0
        v = 0.9 * v + 0.1 * local * (weight.grad + 0.01 * x)
        x = x - v
        made.step()
    torch.testing.assert_close(weight.detach(), x, rtol=1e-12, atol=1e-12)
    assert torch.isfinite(still).all(), "weights of norm 0 are scaled by 1"
    with pytest.raises(UserError, match="nesterov is none of momentum, weight_decay, trust"):
        optimizer(TrainingConfig(optimizer="lars", optimizer_options={"nesterov": True}))([weight])


def scripted(made: Run, losses: Iterable[float]) -> Run:
    """A run whose evaluations find these losses."""
    told = iter(losses)
    evaluation = made.trainer.evaluation
    assert evaluation is not None
    evaluation.run = lambda: next(told)  # type: ignore[method-assign]
    return made


def kept(made: Run) -> list[int]:
    return sorted(int(path.name[10:16]) for path in (made.directory / "checkpoints").glob("iteration-*"))


LOOKS = {"training.evaluation_interval": 1, "checkpoint.best": "evaluation.loss", "checkpoint.keep": 1}
INF = float("inf")


def test_the_best_checkpoint_is_kept_and_told(tmp_path: Path) -> None:
    losses = [5.0, 3.0, 4.0, float("nan"), 2.0, 2.0, 6.0, 6.0]
    made = scripted(Run(tiny(LOOKS | {"checkpoint.interval": 3}), tmp_path), losses).train()
    assert kept(made) == [5, 8]
    assert json.loads((tmp_path / "summary.json").read_text())["best"] == {
        "metric": "evaluation.loss", "value": 2.0, "iteration": 5, "since": 3
    }  # fmt: skip
    best = CheckpointManifest.read(tmp_path / "checkpoints" / "iteration-000008").standing.best
    assert (best.value, best.iteration) == (2.0, 5)
    alone = scripted(Run(tiny(LOOKS), tmp_path / "alone"), losses).train()
    assert kept(alone) == [5], "checkpoint.interval: -1 writes no others"


def test_a_run_that_gets_no_better_ends(tmp_path: Path) -> None:
    job = LOOKS | {"training.patience": 2, "checkpoint.interval": 0}
    made = scripted(Run(tiny(job), tmp_path / "run"), [5.0, 3.0, 3.5, INF, 1.0]).train()
    assert "evaluation.loss was not better 2 times in a row: the run ends" in made.said
    assert (made.trainer.ended.code, made.trainer.iteration, kept(made)) == (0, 4, [2, 4])
    again = Run(tiny(job), tmp_path / "again", tmp_path / "run").train()
    assert again.trainer.iteration == 4
    more = scripted(Run(tiny(job | {"training.patience": 3}), tmp_path / "more", tmp_path / "run"), [4.0]).train()
    assert more.trainer.iteration == 5
    other = Run(tiny(job | {"checkpoint.best": "train.loss"}), tmp_path / "other", tmp_path / "run").train()
    assert other.trainer.iteration == 8, "another metric begins anew"


def test_what_is_looked_at_is_what_is_saved(tmp_path: Path) -> None:
    """An evaluation in the middle of an update would be of other weights than the checkpoint's."""
    made = scripted(Run(tiny(LOOKS | {"training.gradient_accumulation": 3}), tmp_path), [5.0, 4.0, 6.0]).train()
    assert [line["iteration"] for line in made.metrics if line["kind"] == "evaluation"] == [3, 6, 8]
    assert kept(made) == [6]


@pytest.mark.parametrize("metric", ["train.loss", "train.tokens_per_second", "train.gradient_norm"])
def test_metrics_of_training_are_looked_at_where_a_checkpoint_is_due(metric: str, tmp_path: Path) -> None:
    made = run(tiny({"checkpoint.best": metric, "checkpoint.interval": 2, "checkpoint.keep": 1}), tmp_path)
    name, lines = metric.split(".")[1], [line for line in made.lines if line["iteration"] % 2 == 0]
    choose = max if name == "tokens_per_second" else min
    best = choose(lines, key=lambda line: line[name])
    assert kept(made) == sorted({best["iteration"], 8})
    assert made.summary["best"]["value"] == best[name]


def test_looks_that_never_come_are_told() -> None:
    told = [
        *idle_keys(PipelineConfig.from_dict(tiny({"checkpoint.best": "evaluation.loss"}))),
        *idle_keys(PipelineConfig.from_dict(tiny({"checkpoint.best": "train.loss", "training.patience": 2}))),
        *idle_keys(PipelineConfig.from_dict(tiny({"training.patience": 2}))),
    ]
    assert told == [
        "checkpoint.best has no effect with evaluation_interval -1",
        "checkpoint.best has no effect with checkpoint.interval -1",
        "training.patience has no effect with checkpoint.best null",
    ]


@pytest.mark.parametrize("scheduler", ["1f1b", "zb-h1", "pipedream"])
def test_norms_of_layers_and_groups_are_told_when_asked(scheduler: str, tmp_path: Path) -> None:
    """Beside torch's norms of the gradients that the optimizers of a run with other cuts and moves get."""
    job = {"parallel.scheduler": scheduler, "training.parameter_groups": CLIPPED, "training.optimizer": "sgd"}
    made = Run(tiny(job | {"observe.gradient_norms": True}), tmp_path)
    pipeline, found = made.trainer.session.pipeline, {}
    for stepped in pipeline.optimizers.values():
        stepped.register_step_pre_hook(_noting({id(p): name for name, p in pipeline.parameters().items()}, found))
    if scheduler == "1f1b":
        moves = iter([pipeline.layout.with_counts([3, 1])])
        made.trainer.updated = lambda: next((pipeline.move(layout) for layout in moves), None)
    made.train()
    told = made.lines[-1]["gradient_norms"]
    assert len(told) == 4 + 2
    for name, norm in told.items():
        word = name.split()[0]
        of = {"vectors": lambda n, g: g.dim() < 2, "1.attention.*": lambda n, g: n.startswith("1.attention.")}.get(
            name.removeprefix("group "), lambda n, g, word=word: n.startswith(f"{word}.")
        )
        members = [gradient for each, gradient in found.items() if of(each, gradient)]
        assert norm == pytest.approx(float(nn.utils.get_total_norm(members)), rel=1e-5), name
    assert "gradient_norms" not in run(tiny(job), tmp_path / "plain").lines[-1]


def test_the_scale_of_losses_moves_as_torchs() -> None:
    """``torch.amp.GradScaler``'s own kernel beside ours, which never falls below 1."""
    dice = torch.Generator().manual_seed(0)
    ours = LossScale(64.0, dynamic=True, growth_interval=3)
    value, tracker = torch.tensor(64.0), torch.tensor(0, dtype=torch.int32)
    for _ in range(200):
        finite = bool(torch.rand((), generator=dice) > 0.25)
        torch._amp_update_scale_(value, tracker, torch.tensor(float(not finite)), 2.0, 0.5, 3)
        value.clamp_(min=1.0)
        ours.update(finite)
        assert (ours.value, ours.good_steps) == (float(value), int(tracker))


def test_the_best_is_sound(tmp_path: Path) -> None:
    """A loss that is seen while gradients are not finite is no best one: its checkpoint would wait."""
    made = scripted(Run(tiny(LOOKS | {"checkpoint.interval": 100}), tmp_path), [5.0, 4.0, 4.5, 1.0, 4.2, 4.2, 4.2, 4.2])
    parameter = next(made.trainer.session.pipeline.modules()[1].parameters())
    parameter.register_hook(lambda g: g * float("nan") if made.trainer.iteration == 3 else g)
    made.train()
    assert made.summary["best"] == {"metric": "evaluation.loss", "value": 4.0, "iteration": 2, "since": 6}
    first = Best("train.tokens_per_second")
    assert all(first.after(value, 1).value is None for value in (float("nan"), INF))


def saver(folder: Path, process: int) -> Saver:
    return Saver(CheckpointPlace(folder, process, 2, 2))


def test_a_save_waits_for_the_receipts_of_all_and_leaves_the_next_one_alone(tmp_path: Path) -> None:
    line, standing = Line("a" * 12), Standing(6, 0, 0, (), 0, 0, 6, 1.0, 0, 0, "adam", "m")
    savers = [saver(tmp_path, process) for process in range(2)]
    saves = [Save(standing, line, {}) for _ in savers]
    left = [
        tmp_path / f".iteration-{name}.partial"
        for name in (f"000007-{line.run}", f"000005-{line.run}", "000007-" + "b" * 12)
    ]
    for folder in left:
        folder.mkdir()
    for process, (made, save) in enumerate(zip(savers, saves, strict=True)):
        made.begin(save, lambda process=process: {process: {"param/w": torch.ones(2)}})  # type: ignore[misc]
        assert not made.problem()
        assert save.path is None or process == 1
    for save in saves:
        save.all_written.set()
    assert [made.end() for made in savers] == ["", ""]
    found = CheckpointManifest.read(tmp_path / "iteration-000006")
    assert sorted(found.files) == ["layer-0000.safetensors", "layer-0001.safetensors"]
    assert [folder.exists() for folder in left] == [True, False, False]


def test_the_plan_of_a_run_counts_its_updates(tmp_path: Path) -> None:
    """Warm-up in updates where each has several iterations; data that end before ``max_iterations``."""
    changes = {"training.gradient_accumulation": 2, "training.warmup": 4.0, "training.max_iterations": 100}
    made = run(tiny(changes), tmp_path)
    assert [line["learning_rate"] for line in made.lines] == [0.0025, 0.0025, 0.005, 0.005, 0.0075, 0.0075, 0.01, 0.01]
    drains = run(tiny({"parallel.scheduler": "pipedream", "training.epochs": 1}), tmp_path / "drains")
    assert [line["update"] for line in drains.lines] == [4, 8, 12, 16]
    long = run(tiny({"training.warmup": 0.5, "checkpoint.interval": 6}), tmp_path / "long")
    rest = run(
        tiny({"training.warmup": 0.5}), tmp_path / "rest", tmp_path / "long" / "checkpoints" / "iteration-000006"
    )
    expected = [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01, 0.01, 0.01]
    assert [line["learning_rate"] for line in long.lines] == expected
    assert rest.trainer.iteration == 8
