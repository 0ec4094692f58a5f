"""From a model to its pieces: four runs with stand-ins, and what they show."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.models.huggingface.anatomy import Anatomy, anatomy, library_models
from vpipe.models.huggingface.part import Frame
from vpipe.models.huggingface.pieces import CallPlan, Piece, planned
from vpipe.models.huggingface.recorder import CallRecorder, Recording
from vpipe.models.huggingface.standins import HOOKS, StandIns
from vpipe.models.huggingface.tasks import ModelTask

CAPTURED = ("output_router_logits", "output_hidden_states", "output_attentions")


def cut_frame(root: nn.Module, task: ModelTask, examples: tuple[Mapping[str, Tensor], ...]) -> Frame:
    """The pieces of ``root`` for inputs like ``examples``: one, one of other sizes, one of other values."""
    install_capture(root)
    refuse_layer_drop(root)
    body, stand_ins = anatomy(root), StandIns(root)
    first, resized, other = examples

    versions = {name: buffer._version for name, buffer in root.named_buffers()}

    def run(inputs: Mapping[str, Tensor], fill: float) -> Recording:
        recorder = CallRecorder(root, body, stand_ins, fill)
        recording = recorder.run(inputs, task)
        if not library_models(root):
            refuse_memory(root, recorder.copy, body, versions)
        return recording

    try:
        run(first, 0.37)
    except RuntimeError:  # code that writes into an activation needs one with memory
        stand_ins.solid = True
    recordings = (run(first, 0.37), run(resized, 0.37), run(other, 0.37), run(first, 0.61))
    plan = planned(recordings, (first, resized), frozenset(body.blocks))
    rest(plan, body)
    for piece in plan.pieces:
        path = plan.paths[piece.calls[0]]
        if path in body.blocks:
            piece.cost_key = kind_of(root, path)
    return Frame(root, body, plan, task, stand_ins)


def refuse_memory(root: nn.Module, ran: nn.Module, body: Anatomy, versions: Mapping[str, int]) -> None:
    """Refuse what the code between the blocks keeps from one run to the next: every piece would keep its own."""
    kept = [name for name, buffer in root.named_buffers() if buffer._version != versions[name]]
    for path in body.spine:
        mine, its = root.get_submodule(path), ran.get_submodule(path)
        kept += [name for name, buffer in its._buffers.items() if buffer is not mine._buffers.get(name)]
        kept += [
            name for name, value in vars(mine).items() if isinstance(value, int | float) and vars(its)[name] != value
        ]
        kept += ["a result by a hook"] if any(vars(mine)[name] for name in HOOKS) else []
    if kept:
        raise UserError(
            f"the forward of {type(root).__name__} changes {kept[0]} outside its blocks, where no stage has it alone; "
            "put that into a block"
        )


def rest(plan: CallPlan, body: Anatomy) -> None:
    """Modules that no piece calls stay with the last one, so that a checkpoint has them."""
    used = {plan.paths[call] for piece in plan.pieces for call in piece.calls}
    plan.pieces[-1].idle = tuple(path for path in (*body.blocks, *body.units) if path not in used)


def owned_paths(plan: CallPlan, piece: Piece) -> tuple[str, ...]:
    """The modules of a piece."""
    return (*dict.fromkeys(plan.paths[call] for call in piece.calls), *piece.idle)


def kind_of(root: nn.Module, path: str) -> str:
    """A name that only blocks of the same cost share: class, shapes, and what it looks at."""
    block = root.get_submodule(path)
    shapes = hash(tuple((name, tuple(p.shape)) for name, p in block.named_parameters())) & 0xFFFF
    sight = [
        str(value)
        for _, module in block.named_modules()
        for name in ("layer_type", "attention_type", "is_sliding", "sliding_window")
        if isinstance(value := getattr(module, name, None), str | int)
    ]
    return f"{type(block).__name__} {shapes:x} {' '.join(dict.fromkeys(sight))}".strip()


def install_capture(root: nn.Module) -> None:
    """The library's hooks for values that it collects inside blocks, such as router logits; put there once, as its
    own forward does."""
    for _, model in library_models(root):
        from transformers.utils import output_capturing

        if any(getattr(model.config.get_text_config(), name, False) for name in CAPTURED):
            output_capturing.maybe_install_capturing_hooks(model)


def refuse_layer_drop(root: nn.Module) -> None:
    for _, model in library_models(root):
        drops = {
            name: value
            for name, value in model.config.to_dict().items()
            if name.endswith("layerdrop") and isinstance(value, float) and value > 0
        }
        for name, value in drops.items():
            raise UserError(
                f"the {model.config.model_type} config has {name} {value}, which drops whole layers at random; a "
                f"pipeline cannot, so set {name} to 0"
            )


def varied(example: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """From one example: one of fewer rows and tokens, one of the same rows only, one of other values."""
    rows = {name: torch.cat((value, value[:1])) if value.dim() else value for name, value in example.items()}
    shorter = {
        name: value[..., :-1] if value.dim() == 2 and not value.is_floating_point() and value.shape[1] > 2 else value
        for name, value in rows.items()
    }
    other = {
        name: value + 0.1 if value.is_floating_point() else value.flatten().roll(1).view(value.shape)
        for name, value in example.items()
    }
    return shorter, rows, other
