"""A piece at work: the model's own forward, in which only this piece's modules compute.

The part holds its modules and nothing of the others' weights. It runs a copy of the spine; calls of other pieces'
modules are answered by stand-ins or by values that were read, and once all that the piece writes is there, the run
stops."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vpipe.errors import UserError
from vpipe.models.huggingface.anatomy import Anatomy
from vpipe.models.huggingface.pieces import CallPlan, Piece
from vpipe.models.huggingface.recorder import fire_hooks, gated_copy
from vpipe.models.huggingface.standins import AbsentTensor, KeepOutput, StandIns, hooked, shaped, without_hooks
from vpipe.models.huggingface.tasks import ModelTask
from vpipe.models.huggingface.trees import leaves, mapped


class Frame:
    """What all parts of a model share. ``root`` is never run and never changed, only copied in its upper modules."""

    def __init__(self, root: nn.Module, body: Anatomy, plan: CallPlan, task: ModelTask, stand_ins: StandIns) -> None:
        self.root, self.body, self.plan, self.task, self.stand_ins = root, body, plan, task, stand_ins

    def __deepcopy__(self, memo: Any) -> Frame:
        return self


class Part(nn.Module):
    """A layer of the cut. ``units`` are its modules by path, ``raw`` its parameters that are used on their own."""

    def __init__(
        self, frame: Frame, piece: Piece, units: Mapping[str, nn.Module], raw: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__()
        self.frame, self.piece, self.training = frame, piece, frame.root.training
        self.spines: list[_Spine] = []
        """Copies of the model's upper modules that no run uses now; runs in several threads need one each."""
        self.paths: dict[str, str] = {}
        """Own attribute → path in the original model."""
        self.attributes: dict[str, str] = {}
        for path in frame.body.free:
            self._attach(path, copy.deepcopy(frame.root.get_submodule(path)))
        for path, unit in units.items():
            self._attach(path, unit)
        for path, parameter in raw.items():
            self._attach(path, parameter)
        for path, buffer in self._spine_buffers():
            self._attach(path, buffer.clone())

    def _attach(self, path: str, value: Any) -> None:
        name = path.rpartition(".")[2]
        name = "block" if name.isdigit() else name
        while name in self.attributes.values() or hasattr(self, name):
            name += "_"
        self.paths[name], self.attributes[path] = path, name
        if isinstance(value, nn.Module):
            self.add_module(name, value)
        elif isinstance(value, nn.Parameter):
            self.register_parameter(name, value)
        else:
            self.register_buffer(name, value)

    def _spine_buffers(self) -> list[tuple[str, Tensor]]:
        return [
            (f"{path}.{name}" if path else name, buffer)
            for path in self.frame.body.spine
            for name, buffer in self.frame.root.get_submodule(path)._buffers.items()
            if buffer is not None
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "spines"} | {"spines": []}

    def own_names(self) -> dict[str, str]:
        """Name here → name in the model, of everything that a checkpoint of this layer holds."""
        return {name: hub_name(self.paths, name) for name in self.state_dict()}

    def own(self, path: str) -> Any:
        """This part's module, parameter or buffer that the model has at ``path``."""
        return getattr(self, self.attributes[path])

    def forward(self, *values: Any) -> Any:
        given = dict(zip(self.piece.reads, values, strict=True))
        for name in {*given}.intersection(self.frame.plan.inputs):  # a single one comes as it was given
            given[name] = given[name][name] if isinstance(given[name], dict) else given[name]
        return _Run(self, given).result()


class _Finished(BaseException):
    """All that a piece writes is there. (The model's code must not catch it.)"""


class _Run:
    """One run of a part."""

    def __init__(self, part: Part, given: dict[str, Any]) -> None:
        self.part, self.piece, self.given = part, part.piece, given
        self.written: dict[str, Any] = {}
        self.count = 0
        self.plan = part.frame.plan
        self.device = next((leaf.device for _, leaf in leaves(given) if isinstance(leaf, Tensor)), torch.device("cpu"))

    def result(self) -> Any:
        spine = self.part.spines.pop() if self.part.spines else _Spine(self.part)
        try:
            return self.run(spine.for_run(self))
        finally:
            spine.run = None
            self.part.spines.append(spine)

    def run(self, model: nn.Module) -> Any:
        frame, piece = self.part.frame, self.piece
        inputs = {name: self.given[name] if name in self.given else self.absent(name) for name in self.plan.inputs}
        try:
            made = model(**frame.task.arguments(inputs))
        except _Finished:
            values = tuple(self.written[name] for name in piece.writes)
            return values[0] if len(values) == 1 else values
        if not piece.last:
            raise UserError(
                f"the forward of {type(frame.root).__name__} does not come by {piece.name} as it did with the example "
                "(another mode, other inputs), so it is not cut"
            )
        return frame.task.output(model, made)

    def absent(self, name: str) -> Any:
        """A stand-in for an input that this piece does not read."""
        if name not in self.piece.sizes:
            return None
        rule, dtype = self.piece.sizes[name]
        size = tuple(step if isinstance(step, int) else self.given[step[0]].shape[step[1]] for step in rule)
        return AbsentTensor(size, dtype).tensor(self.device)

    def answer(self, path: str, args: Any, kwargs: Any) -> Any:
        """A call of a module, in the order of the plan."""
        index, self.count = self.count, self.count + 1
        if index >= len(self.plan.paths) or self.plan.paths[index] != path:
            raise UserError(
                f"the model called {path} as module {index} where it called "
                f"{self.plan.paths[index] if index < len(self.plan.paths) else 'nothing'} before: its layers are not a "
                "list that a pipeline can cut (layer drop must be 0)"
            )
        self.take(index, (args, kwargs))
        if index in self.piece.calls and path in self.part.attributes:
            return self.call(index, path, args, kwargs)
        shapes, inner = self.part.frame.stand_ins.returned(path, args, kwargs)
        made = self.standing(index, ("out",), shapes)
        sides = {name: self.standing(index, ("hook", name), value) for name, value in inner.items()}
        fire_hooks(self.part.frame.root.get_submodule(path), args, made, sides)
        return made

    def call(self, index: int, path: str, args: Any, kwargs: Any) -> Any:
        """A call of a module of this piece: the real one."""

        def put(leaf_path: Any, leaf: Any) -> Any:
            name = self.piece.taken.get((index, leaf_path))
            return leaf if name is None else self.fitting(name, tuple(leaf.shape))

        args, kwargs = mapped((args, kwargs), put)
        unit = self.part.own(path)
        sides: dict[str, Any] = {}
        handles = [
            module.register_forward_hook(KeepOutput(sides, name)) for name, module in hooked(unit).items() if name
        ]
        try:
            made = unit(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        self.check(path, args, kwargs, made)
        self.take(index, {"out": made, "hook": sides})
        return made

    def check(self, path: str, args: Any, kwargs: Any, made: Any) -> None:
        """A stand-in elsewhere must have the sizes of the real result."""
        expected, _ = self.part.frame.stand_ins.returned(path, args, kwargs)
        for leaf_path, leaf in leaves(shaped(made)):
            stood = dict(leaves(expected)).get(leaf_path)
            if isinstance(leaf, AbsentTensor) and isinstance(stood, AbsentTensor) and leaf.size != stood.size:
                raise UserError(
                    f"{path} returned a tensor of {leaf.size} where {stood.size} was expected, so this model is not cut"
                )

    def take(self, index: int, value: Any) -> None:
        """Keep what is written; stop when all is there."""
        wanted = {leaf: name for (call, leaf), name in self.piece.given.items() if call == index}
        if not wanted:
            return
        for path, leaf in leaves(value):
            if path in wanted:
                self.written[wanted[path]] = leaf
        if not self.piece.last and len(self.written) == len(self.piece.writes):
            raise _Finished

    def fitting(self, name: str, size: tuple[int, ...]) -> Any:
        """A value that was read, which must have the size of what it stands for."""
        value = self.given[name]
        if tuple(value.shape) != size:
            raise UserError(
                f"{self.piece.name} got {name} of {tuple(value.shape)} where the model's code expects {size}; "
                "give layers() an example of the inputs that you train with"
            )
        return value

    def standing(self, index: int, start: Any, shapes: Any) -> Any:
        def stand(path: Any, leaf: Any) -> Any:
            name = self.piece.taken.get((index, (*start, *path)))
            if name is not None:
                return self.fitting(name, leaf.size)
            if not isinstance(leaf, AbsentTensor):
                return leaf
            return leaf.tensor(self.device, solid=self.part.frame.stand_ins.solid)

        return mapped(shapes, stand)


class _Spine:
    """The copy of the model's upper modules, with this part's own parameters, buffers and mode."""

    def __init__(self, part: Part) -> None:
        self.part, self.run = part, None
        body = part.frame.body
        free = {path: part.own(path) for path in body.free}
        self.root = gated_copy(part.frame.root, body, self.answer, free)
        for full in part.attributes:
            if full in body.called:
                share(self.root.get_submodule(full), part.own(full))

    run: _Run | None

    def answer(self, path: str, args: Any, kwargs: Any) -> Any:
        if self.run is None:
            raise UserError(
                f"{path} is called in a backward (torch.utils.checkpoint), where it has no stage; call it without, and "
                "give Pipeline(recompute=1.0)"
            )
        return self.run.answer(path, args, kwargs)

    def for_run(self, run: _Run) -> nn.Module:
        self.run, part = run, self.part
        for path in part.frame.body.spine:
            module, own = self.root.get_submodule(path), part.frame.root
            module.training = part.training and (own.get_submodule(path).training or not own.training)
            for kind in (module._buffers, module._parameters):
                for name, tensor in kind.items():
                    full = f"{path}.{name}" if path else name
                    if full in part.attributes:
                        kind[name] = part.own(full)
                    elif tensor is not None:
                        stand_in = AbsentTensor(tuple(tensor.shape), tensor.dtype).tensor(run.device)
                        kind[name] = stand_in  # type: ignore[assignment]  # used only for its size
        for full in part.piece.raw:
            if full in part.attributes:
                put_parameter(self.root, part.frame.body, full, part.own(full))
        return self.root


def share(seen: nn.Module, unit: nn.Module) -> None:
    """Let the attributes of a module that a part holds be the part's own."""
    for name in ("_parameters", "_buffers", "_modules"):
        seen.__dict__[name] = unit.__dict__[name]


def put_parameter(root: nn.Module, body: Anatomy, path: str, parameter: nn.Parameter) -> None:
    """Put a parameter in its place; modules on the way that belong to others are copied first."""
    owner, _, name = path.rpartition(".")
    module, steps = root, [step for step in owner.split(".") if step]
    for index, step in enumerate(steps):
        child = module.get_submodule(step)
        if ".".join(steps[: index + 1]) not in body.spine:
            child = without_hooks(child)
            child.__dict__["_modules"] = dict(child._modules)
            child.__dict__["_parameters"] = dict(child._parameters)
            module._modules[step] = child
        module = child
    module._parameters[name] = parameter


def hub_name(paths: Mapping[str, str], name: str) -> str:
    """The name in the original model of a part's parameter or buffer ``name``."""
    attribute, _, rest = name.partition(".")
    return f"{paths[attribute]}.{rest}" if rest else paths[attribute]


def hub_names(part: nn.Module) -> dict[str, str]:
    """Own name → original name, of everything that a checkpoint of this layer holds: for export to Hugging Face."""
    assert isinstance(part, Part)
    return part.own_names()
