"""Layers that move to a rank which reads them from the copies of an elastic run: the same bits, fewer bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_gloo import Worlds
from runtime_models import build
from runtime_moves import layout_of
from runtime_support import Case, differing, pipeline
from test_runtime_move import broken_moves
from torch import Tensor

from vpipe import Pipeline, UserError
from vpipe.rundir.manifest import Standing
from vpipe.runtime.moves import held
from vpipe.train.copies import CopyShelf, HeldCopies, Part

THERE = ((1, 5), (1, 0))


def tensors(pipe: Pipeline) -> dict[int, dict[str, Tensor]]:
    """Weights and optimizer state, layer by layer, as copies have them."""
    states = {id(p): state for optimizer in pipe.optimizers.values() for p, state in optimizer.state.items()}
    found: dict[int, dict[str, Tensor]] = {}
    for layer, module in pipe.modules().items():
        found[layer] = {}
        for name, parameter in module.named_parameters():
            found[layer][f"param/{name}"] = parameter.detach()
            for key, value in states.get(id(parameter), {}).items():
                found[layer][f"optimizer/{name}/{key}"] = value
    return found


class Confused(HeldCopies):
    """Reads what another rank has there."""

    def read(self, place: Sequence[Any]) -> Tensor:
        return super().read([1 - place[0], *place[1:]])


def move_held(case: Case, folder: str, what: str) -> tuple[list[float], dict[str, Any], int]:
    """One rank that trains, copies, moves and trains; what it had to receive."""
    held.LEAST = 1
    model = build(case.model, case.num_layers, case.dropout)
    pipe = pipeline(case, model)
    rows = case.rows * pipe.programs.num_units
    losses = [pipe.train_step(*model.data(rows, 0))]
    shelves = [
        CopyShelf([os.open(f"{folder}/{rank}-{piece}", os.O_RDWR | os.O_CREAT) for piece in range(2)])
        for rank in range(2)
    ]
    if what != "sent":
        standing = Standing(1, 0, 8, 4, 1, 1.0, 0, 0, "adam", "model")
        shelves[pipe.rank].write(standing, Part(1, pipe.rank, 2), tensors(pipe))
        pipe.held = HeldCopies(shelves, pipe.rank)
    if what == "changed":
        with torch.no_grad():
            for parameter in pipe.parameters().values():
                parameter.mul_(1.5)
    if what == "another's":
        pipe.held = Confused(shelves, pipe.rank)
        with pytest.raises(UserError, match="the layers stay where they are"):
            pipe.move(layout_of(pipe.layout, THERE))
        pipe.held = None
    elif what == "broken":
        broken_moves(pipe, layout_of(pipe.layout, THERE), 12, 1)
    moved = pipe.move(layout_of(pipe.layout, THERE))
    losses += [pipe.train_step(*model.data(rows, step)) for step in (1, 2)]
    state = {name: tensor.detach().clone() for name, tensor in pipe.state_dict().items()}
    pipe.close()
    return losses, state, moved.num_bytes


def left_alone(case: Case, what: str) -> tuple[list[float], dict[str, Any]]:
    model = build(case.model, case.num_layers, case.dropout)
    pipe = pipeline(replace(case, more={}), model, case.num_ranks)
    rows, losses = case.rows * pipe.programs.num_units, []
    for step in range(3):
        if step == 1 and what == "changed":
            with torch.no_grad():
                for parameter in pipe.parameters().values():
                    parameter.mul_(1.5)
        losses.append(pipe.train_step(*model.data(rows, step)))
    return losses, pipe.state_dict()


@pytest.mark.parametrize(
    ("what", "model"), [("held", "tied"), ("changed", "plain"), ("another's", "plain"), ("broken", "batch_norm")]
)
def test_layers_come_from_copies_and_no_bit_knows(what: str, model: str, worlds: Worlds, tmp_path: Path) -> None:
    """A tensor that has changed since is sent; a place that has something else refuses the move, on all ranks; a move
    that breaks at any step gives back what copies have."""
    case = Case("1f1b", model, 2, num_layers=6, more={"transport": "shm"})
    losses, expected = left_alone(case, what)
    sizes = {}
    for how in ("sent", what) if what == "held" else (what,):
        (tmp_path / how).mkdir()
        found = worlds.run(2, move_held, case, str(tmp_path / how), how)
        sizes[how] = sum(size for _, _, size in found)
        for mine, state, _ in found:
            assert mine == losses
            assert not differing(state, {name: expected[name] for name in state})
    if what == "held":
        assert sizes["held"] < sizes["sent"]
