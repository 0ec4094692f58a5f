"""Train a case in a pipeline and again by ``Replay``, and compare to the bit."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from runtime_models import Model, build
from torch import Tensor, nn

from vpipe import Pipeline
from vpipe.layer import Layer
from vpipe.runtime.microbatches import split
from vpipe.runtime.replay import Replay, ReplayUnit
from vpipe.schedule.action import parse
from vpipe.schedule.program import Program
from vpipe.schedule.verify import verify

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
COUNTS: Counter[str] = Counter()
"""How many cases of the equality matrix ran, by transport."""


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    schedule: str
    model: str = "plain"
    num_ranks: int = 2
    num_microbatches: int = 4
    optimizer: str = "adam"
    dropout: float = 0.1
    recompute: Any = 0.0
    replicas: Any = 1
    clip_norm: float | None = None
    num_layers: int = 10
    rows: int = 2
    """Rows of one unit."""
    num_steps: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    """Further arguments of ``Pipeline``."""


def pipeline(case: Case, model: Model, num_ranks: int | None = None) -> Pipeline:
    return Pipeline(
        model.layers,
        model.loss,
        schedule=case.schedule,
        num_microbatches=case.num_microbatches,
        num_ranks=num_ranks,
        optimizer=OPTIMIZERS[case.optimizer],
        recompute=case.recompute,
        replicas=case.replicas,
        tied=model.tied,
        seed=3,
        clip_norm=case.clip_norm,
        schedule_options=case.options,
        **case.more,
    )


def replay_of(pipe: Pipeline, modules: dict[int, nn.Module], case: Case, model: Model) -> Replay:
    replicas = [len(ranks) for ranks in pipe.placement.ranks_of]
    optimizer = OPTIMIZERS[case.optimizer]
    return Replay(
        pipe.flow, modules, model.loss, optimizer, seed=3, tied=model.tied, clip_norm=case.clip_norm, replicas=replicas
    )


def modules_of(model: Model) -> dict[int, nn.Module]:
    """Copies of the layers, for a replay."""
    return {
        index: copy.deepcopy(layer.build() if isinstance(layer, Layer) else layer)
        for index, layer in enumerate(model.layers)
    }


def units_of(pipe: Pipeline, program: Program, inputs: Any, targets: Any) -> list[ReplayUnit]:
    """The units of a batch, with the weights that the mode gives them."""
    parts, shares = split(inputs, program.num_microbatches)
    goals, _ = split(targets, program.num_microbatches)
    weights = pipe.programs.gradient_weights(program) or shares
    return [ReplayUnit(*each) for each in zip(parts, goals, weights, shares, strict=True)]


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names whose tensors are not equal to the bit (NaNs in the same places are)."""
    assert found.keys() == expected.keys()
    return [
        name for name in found if found[name].dtype != expected[name].dtype or not _same(found[name], expected[name])
    ]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def weights_of(state: dict[str, Tensor], with_buffers: bool) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if with_buffers or not _is_buffer(name)}


def _is_buffer(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in ("running_mean", "running_var", "num_batches_tracked")


def check_trace(program: Program) -> None:
    violations = list(verify(program))
    assert not violations, violations[0]


def check(case: Case) -> Pipeline:
    """Train in process and by replay: losses, weights and buffers are equal, and what was executed verifies."""
    model = build(case.model, case.num_layers, case.dropout)
    modules = modules_of(model)
    pipe = pipeline(case, model, case.num_ranks)
    replay = replay_of(pipe, modules, case, model)
    for step in range(case.num_steps):
        inputs, targets = model.data(case.rows * pipe.programs.num_units, step)
        loss = pipe.train_step(inputs, targets)
        executed = pipe.trace().program()
        check_trace(executed)
        expected = replay.run(executed, units_of(pipe, executed, inputs, targets))
        assert loss == expected, f"step {step}: the loss is {loss}, replayed {expected}"
    alone = not pipe.placement.has_replicas  # replicas see different units, so their running statistics differ
    wrong = differing(weights_of(pipe.state_dict(), alone), weights_of(replay.state_dict(), alone))
    assert not wrong, f"{len(wrong)} tensors differ, the first is {wrong[0]}"
    COUNTS["in-process"] += 1
    return pipe


def train_rank(case: Case) -> tuple[list[float], dict[str, Tensor], list[list[str]]]:
    """One rank of a process group: its losses, its weights, and what it executed."""
    model = build(case.model, case.num_layers, case.dropout)
    pipe = pipeline(case, model)
    losses, rows = [], []
    for step in range(case.num_steps):
        losses.append(pipe.train_step(*model.data(case.rows * pipe.programs.num_units, step)))
        (records,) = pipe.trace().records.values()
        rows.append([str(record.action) for record in records])
    state = {name: tensor.detach().clone() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return losses, state, rows


def check_processes(run: Callable[..., list[Any]], case: Case) -> None:
    """The same as ``check`` with a process for every rank; ``more["transport"]`` says what carries the messages."""
    answers = run(case.num_ranks, train_rank, case)
    model = build(case.model, case.num_layers, case.dropout)
    modules = modules_of(model)
    here = replace(case, more={name: value for name, value in case.more.items() if name != "transport"})
    pipe = pipeline(here, model, case.num_ranks)
    replay = replay_of(pipe, modules, case, model)
    for step in range(case.num_steps):
        inputs, targets = model.data(case.rows * pipe.programs.num_units, step)
        rows = [[parse(text) for text in rows[step]] for _, _, rows in answers]
        executed = pipe.programs.training().with_rows(rows)
        check_trace(executed)
        expected = replay.run(executed, units_of(pipe, executed, inputs, targets))
        assert [losses[step] for losses, _, _ in answers] == [expected] * case.num_ranks
    alone = not pipe.placement.has_replicas
    expected_state = weights_of(replay.state_dict(), alone)
    seen = set()
    for _, state, _ in answers:
        mine = weights_of(state, alone)
        seen |= mine.keys()
        wrong = differing(mine, {name: expected_state[name] for name in mine})
        assert not wrong, f"{len(wrong)} tensors differ, the first is {wrong[0]}"
    assert seen == expected_state.keys()
    COUNTS[f"processes ({case.more.get('transport', 'auto')})"] += 1
