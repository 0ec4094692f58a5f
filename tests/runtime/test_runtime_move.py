"""Layers change their ranks between two steps and no bit knows; a move that fails at any moment has never been."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from runtime_gloo import Worlds
from runtime_models import build
from runtime_moves import (
    Moves,
    check_in_processes,
    check_moves,
    layout_of,
    optimizer_states,
    random_moves,
    same,
)
from runtime_support import Case, differing, pipeline
from torch import nn

from vpipe import Pipeline, UserError
from vpipe.runtime.moves import layer_state
from vpipe.schedule.placement import Layout, Seat, loop

THERE_AND_BACK = (((1, 5), (1, 0)), ((4, 2), (0, 1)), ((2, 4), (0, 1)))


@pytest.mark.parametrize("seed", range(12))
def test_random_moves_change_no_bit(seed: int) -> None:
    """``benchmarks/adapt/moves.py`` makes as many as one likes."""
    check_moves(random_moves(seed))


@pytest.mark.rotates(3)
@pytest.mark.slow
@pytest.mark.parametrize("first", range(12, 40, 4))
def test_more_random_moves_change_no_bit(first: int) -> None:
    assert sum(check_moves(random_moves(seed)) for seed in range(first, first + 4)) > 0


@pytest.mark.parametrize("part", ["exp_avg", "step"])
def test_an_optimizer_tensor_left_behind_is_seen(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a move that forgets one tensor of one layer."""
    moves = Moves(Case("1f1b", num_layers=6, num_steps=4), THERE_AND_BACK)
    check_moves(moves)
    complete = layer_state.state_of

    def forgetful(module: nn.Module, optimizer: Any) -> layer_state.State:
        state = complete(module, optimizer)
        for path in [path for path in state["tensors"] if path.endswith(f"/{part}")][:1]:
            state["tensors"][path] = torch.zeros_like(state["tensors"][path])
        return state

    monkeypatch.setattr(layer_state, "state_of", forgetful)
    with pytest.raises(AssertionError, match=r"differs|the loss is"):
        check_moves(moves)


@pytest.mark.parametrize("transport", ["shm", "distributed"])
@pytest.mark.parametrize(
    "case",
    [
        Case("zb-h1", "tied", 2, num_layers=6, num_steps=4, recompute=0.5, optimizer="odd"),
        Case("1f1b", "batch_norm", 2, num_layers=6, num_steps=4, clip_norm=0.5, more={"swap": 0.5}),
    ],
    ids=["tied", "swapped"],
)
def test_moves_between_processes(case: Case, transport: str, worlds: Worlds) -> None:
    check_in_processes(worlds.run, Moves(case, THERE_AND_BACK), transport)


@pytest.mark.parametrize("transport", ["shm", "distributed"])
def test_asynchronous_ranks_change_places_between_processes(transport: str, worlds: Worlds) -> None:
    case = Case("pipedream", "plain", 2, 8, num_layers=6, num_steps=3)
    check_in_processes(worlds.run, Moves(case, (((3, 3), (1, 0)), ((3, 3), (0, 1)))), transport)


def test_replicas_move_between_processes(worlds: Worlds) -> None:
    case = Case("1f1b", "tied", 4, 3, num_layers=6, num_steps=3, replicas=2)
    check_in_processes(worlds.run, Moves(case, (((1, 5), (0, 1, 2, 3)), ((4, 2), (3, 1, 0, 2)))), "shm")


class Broken(Exception):
    """Injected."""


class Breaks:
    """Fails at the n-th step of the protocol."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.seen, self.broken = at, list[str](), ""

    def __call__(self, step: str) -> None:
        self.seen.append(step)
        if self.at is not None and len(self.seen) == self.at + 1:
            self.broken = step
            raise Broken(step)


def broken_moves(pipe: Pipeline, new: Layout, steps: int, rank: int | None = None) -> list[str]:
    """Tries to move, once for each step of the protocol, which fails (on one rank); the steps that failed."""
    old, failed = pipe.layout, []
    for at in range(steps):
        breaks = Breaks(at if rank in (None, pipe.rank) else None)
        with pytest.raises(UserError, match=r"the layers stay where they are.*Broken"):
            pipe.move(new, notice=breaks)
        assert pipe.layout == old
        failed.append(breaks.broken)
    return failed


@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", "tied", 2, num_layers=6, optimizer="odd"),
        Case("1f1b", "plain", 4, 3, num_layers=6, replicas=2),
        Case("pipedream", "plain", 2, 8, num_layers=6),
    ],
    ids=["tied", "replicas", "asynchronous"],
)
def test_a_failure_at_any_step_leaves_the_old_layout(case: Case) -> None:
    model = build(case.model, case.num_layers, case.dropout)
    plain = pipeline(case, model, case.num_ranks)
    other = build(case.model, case.num_layers, case.dropout)
    pipe = pipeline(case, other, case.num_ranks)
    counting = Breaks()
    copied = pipeline(case, build(case.model, case.num_layers, case.dropout), case.num_ranks)
    new = copied.layout.with_counts([1, 5]).with_ranks(list(reversed(range(case.num_ranks))))
    copied.move(new, notice=counting)
    for step in range(2):
        batch = model.data(case.rows * pipe.programs.num_units, step)
        assert pipe.train_step(*batch) == plain.train_step(*batch)
        failed = broken_moves(pipe, new, len(counting.seen))
    kinds = {text.split()[0] for text in failed}
    assert kinds == {"pack", "receive", "switch", "drop", "load", "build", "switched"}
    assert not differing(pipe.state_dict(), plain.state_dict())
    found, wanted = (optimizer_states(p.parameters(), p.optimizers.values()) for p in (pipe, plain))
    assert same(found, wanted)


def break_rank(case: Case, steps: int, breaking: int) -> tuple[list[float], dict[str, Any]]:
    model = build(case.model, case.num_layers, case.dropout)
    pipe = pipeline(case, model)
    losses = [pipe.train_step(*model.data(case.rows * 4, 0))]
    broken_moves(pipe, layout_of(pipe.layout, ((1, 5), (1, 0))), steps, breaking)
    losses.append(pipe.train_step(*model.data(case.rows * 4, 1)))
    pipe.move(layout_of(pipe.layout, ((4, 2), (0, 1))))
    losses.append(pipe.train_step(*model.data(case.rows * 4, 2)))
    state = {name: tensor.detach().clone() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return losses, state


@pytest.mark.parametrize(("transport", "breaking"), [("shm", 0), ("distributed", 1)])
def test_a_failure_of_one_process_leaves_the_old_layout_on_all(transport: str, breaking: int, worlds: Worlds) -> None:
    case = Case("1f1b", "batch_norm", 2, num_layers=6, more={"transport": transport})
    model = build(case.model, case.num_layers, case.dropout)
    here = replace(case, more={})
    plain = pipeline(here, model, 2)
    # Of [0 1 2 | 3 4 5] → rank 1: 0, rank 0: 1 2 3 4 5. On each rank four layers are packed or received, and again
    # dropped or loaded; switch, build, optimizers, switched.
    answers = worlds.run(2, break_rank, case, 12, breaking)
    losses = [plain.train_step(*model.data(case.rows * 4, step)) for step in range(3)]
    expected = plain.state_dict()
    for found, state in answers:
        assert found == losses
        assert not differing(state, {name: expected[name] for name in state})


def two_ranks(**more: Any) -> Pipeline:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    return Pipeline(
        layers,
        nn.functional.mse_loss,
        num_ranks=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        **more,
    )


def test_accumulated_gradients_frozen_layers_and_group_settings_move_along() -> None:
    still, pipe = two_ranks(), two_ranks()
    batch = torch.randn(8, 4), torch.randn(8, 4)
    for each in (still, pipe):
        each.train_step(*batch)
        each.modules()[1].requires_grad_(False)
        each.modules()[2].eval()
        each.optimizers[0].param_groups[0]["lr"] = 0.3
        each.train_step(*batch, update=False)
    pipe.move(pipe.layout.with_counts([1, 3]))
    assert not differing(pipe.gradients(), still.gradients())
    assert [m.training for m in pipe.modules().values()] == [True, True, False, True]
    for each in (still, pipe):
        each.train_step(*batch)
    assert not differing(pipe.state_dict(), still.state_dict())
    assert sorted(g["lr"] for made in pipe.optimizers.values() for g in made.param_groups) == [0.1, 0.3, 0.3]


def test_the_user_keeps_the_modules_that_move() -> None:
    pipe = two_ranks()
    before = pipe.modules()
    pipe.move(pipe.layout.with_counts([3, 1]))
    assert all(pipe.modules()[layer] is before[layer] for layer in range(4))


def test_what_cannot_be_moved_is_said() -> None:
    pipe = two_ranks()
    with pytest.raises(UserError, match="the pipeline has 2 ranks, but the new layout 4"):
        pipe.move(Layout.chain([1, 1, 1, 1]))
    elsewhere = replace(pipe.layout, seats=(pipe.layout.seats[0], Seat("b", "cuda:3")))
    with pytest.raises(UserError, match=r"rank 1 is on .*cpu, but the new layout has it on b cuda:3; a process stays"):
        pipe.move(elsewhere)
    pipe.move(Layout.of([1, 3], loop(2)))
    assert pipe.layout.seats == elsewhere.seats[:1] * 2, "who does not say where ranks sit leaves them there"
    replicas = Pipeline([nn.Linear(4, 4) for _ in range(4)], nn.functional.mse_loss, num_ranks=2, replicas=2)
    replicas.train_step(torch.randn(8, 4), torch.randn(8, 4), update=False)
    with pytest.raises(UserError, match="gradients wait for their update on the replicas"):
        replicas.move(replicas.layout.with_ranks([1, 0]))
    with pytest.raises(UserError, match="a layout may give a rank's whole share to another rank"):
        pipe.move(Layout.of([2, 2], replicas.placement.__class__(((0, 1), (1,)))))


def test_a_rank_holds_one_layer_more_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come waits outside memory: of the blocks that are packed or received, one a rank is alive at a time."""
    import weakref

    alive: list[weakref.ref[Any]] = []
    most = 0
    complete = layer_state.packed

    def counted(state: layer_state.State) -> Any:
        nonlocal most
        block = complete(state)
        alive.append(weakref.ref(block))
        most = max(most, sum(ref() is not None for ref in alive))
        return block

    monkeypatch.setattr(layer_state, "packed", counted)
    pipe = two_ranks()
    pipe.move(pipe.layout.with_ranks([1, 0]))
    assert len(alive) == 4
    assert most <= 2


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_optimizer_objects_survive_a_move(ranks: tuple[int, int]) -> None:
    """Torch's schedulers turn the objects that they were made from."""
    still, pipe = two_ranks(), two_ranks()
    before = pipe.optimizers
    schedulers = [
        torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for p in (still, pipe) for each in p.optimizers.values()
    ]
    batch = torch.randn(8, 4), torch.randn(8, 4)
    for number in range(4):
        assert still.train_step(*batch) == pipe.train_step(*batch)
        for scheduler in schedulers:
            scheduler.step()
        if number < 2:
            pipe.move(pipe.layout.with_counts([1 + number, 3 - number]).with_ranks(ranks))
    assert not differing(pipe.state_dict(), still.state_dict())
    assert all(pipe.optimizers[stage] is each for stage, each in before.items())
