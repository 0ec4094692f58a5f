"""Many small parameters updated as a few large tensors: torch's own step with fewer calls, and the same bits.

An optimizer of torch goes through its parameters one by one, a dozen calls each, and for a small parameter the calls
cost more than the numbers. Those optimizers that treat every number alike may be given one tensor instead of forty:

    state of p, q, r …      lie one behind the other in one tensor; the user's state tensors are views of it
    gradients of p, q, r …  are copied together for the length of one step
    p, q, r … themselves    lie together as well: versions move them anyway (``weights``)

This is for asynchronous stages, which update often. Where weights stay where they are, copying them in and out costs
what the fewer calls save (``benchmarks/updates``), so synchronous stages step as ever.

The step is that of the user's optimizer, class, settings and code; its groups, state and ``state_dict()`` keep their
meaning, and every tensor that somebody holds stays that tensor: only its memory moves. What a block is made of is
checked before every update. Whatever is not as it was (a parameter without gradient, counts that differ, a state that
somebody has loaded, hooks) is updated by ``optimizer.step()`` as ever, and joined anew when the next update finds the
same parameters again.

**Why the bits are the same.** Torch's loops over numbers have a body that takes up to 64 at a time and a tail that
takes one, and the two may round differently (they do for bfloat16 in SGD). A parameter of a multiple of 64 numbers has
no tail, alone or in a block; others stay by themselves. Several threads cut a tensor anywhere, so only one may work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from vpipe.runtime.updates.blocks import Block, are_apart
from vpipe.runtime.updates.optimizing import NUMBERWISE, OptimizerStep, uncompiled

COUNTS = frozenset(["step", "mu_product", "eta", "mu"])
"""What their states have once per parameter and not per number; the same for all parameters of a block."""
EXTRAS = ("foreach", "fused", "capturable", "differentiable")
"""Settings under which a step is another one."""
SMALL = 1 << 17
"""Numbers of the largest parameter that is joined: of a larger one the calls are a small part, and copies are not."""
LARGEST = 1 << 20
"""Numbers of a block: a step takes three times this beside the plain one, whatever the model."""
TAILLESS = 64
"""Numbers that the widest of torch's loops takes at a time."""


class FlatStep(OptimizerStep):
    """The updates of one optimizer of one stage, whose small parameters lie together."""

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        """Of ``parameters`` those that are small may lie together."""
        super().__init__(optimizer)
        self._own = {id(parameter) for parameter in parameters}
        self._fits = type(optimizer) in NUMBERWISE and bool(self._own)
        self._seen: list[Tensor] = []
        """The parameters that had a gradient in the last update."""
        self._sizes: list[int] = []
        """Of the groups, then."""
        self._tried = False
        self._blocks: list[Block] = []
        self._ready: list[Block] = []
        """Those of this update."""
        self._room = torch.empty(0)
        self._rest: list[tuple[Mapping[str, Any], list[Tensor]]] = []
        """(group, its parameters that are not in a block and have a gradient)."""

    def prepare(self) -> Sequence[Block]:
        """Called when all gradients are there: the blocks of this update; none where it is to be a plain one."""
        self._ready = []
        if not self._fits or not _is_plain(self.optimizer) or torch.get_num_threads() != 1:
            return ()
        groups = self.optimizer.param_groups
        seen = [p for group in groups for p in group["params"] if p.grad is not None]
        sizes = [len(group["params"]) for group in groups]
        if sizes != self._sizes or len(seen) != len(self._seen) or not all(map(is_, seen, self._seen)):
            # The first time torch makes the states, and where parameters come and go nothing is joined.
            self._seen, self._sizes, self._tried = seen, sizes, False
            return ()
        if not self._tried or not all(block.is_as_it_was(self.optimizer) for block in self._blocks):
            self._join()
        self._ready = self._blocks
        return self._ready

    def step(self) -> None:
        """One update, after ``prepare``."""
        if not self._ready:
            super().step()
            return
        if "step" in vars(self.optimizer):
            vars(self.optimizer)["_opt_called"] = True  # what a learning-rate scheduler has put there does
        with torch.no_grad():
            for block in self._ready:
                self._update(block)
        for group, parameters in self._rest:
            self._run(group, parameters, self.optimizer.state)

    def _update(self, block: Block) -> None:
        assert block.is_together, "weights lay the blocks of an update together"
        numbers = block.memory
        assert numbers is not None
        numbers.grad = self._gradients(block)
        state = block.state()
        self._run(block.group, [numbers], {numbers: state})
        block.count(state)
        numbers.grad = None
        increment_version(block.parameters)

    def _gradients(self, block: Block) -> Tensor:
        """Those of a block, one behind the other, always in the same memory: it is in the cache when the step reads."""
        parts = [p.grad.reshape(-1) for p in block.parameters if p.grad is not None]
        size, dtype = sum(part.numel() for part in parts), parts[0].dtype
        if self._room.dtype is not dtype or self._room.numel() < size:
            self._room = torch.empty(size, dtype=dtype)
        return torch.cat(parts, out=self._room[:size])

    def _run(self, group: Mapping[str, Any], parameters: list[Tensor], state: Any) -> None:
        """The optimizer's own step, on other parameters."""
        stand_in = object.__new__(type(self.optimizer))
        vars(stand_in).update(vars(self.optimizer))
        vars(stand_in).pop("step", None)
        stand_in.param_groups, stand_in.state = [{**group, "params": parameters}], state
        with uncompiled(type(stand_in)):
            stand_in.step()

    def _join(self) -> None:
        """Lay out the blocks anew."""
        self._blocks, self._rest = [], []
        state = self.optimizer.state
        self._tried = all(parameter in state for parameter in self._seen)
        tensors = [t for p in self._seen for t in (p, *state.get(p, {}).values()) if isinstance(t, Tensor)]
        if not are_apart(tensors):
            return
        for group in self.optimizer.param_groups:
            held: dict[Any, list[list[Tensor]]] = {}
            rest = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                key = _form(parameter, state.get(parameter)) if id(parameter) in self._own else None
                if key is None:
                    rest.append(parameter)
                    continue
                runs = held.setdefault(key, [[]])
                if sum(p.numel() for p in runs[-1]) + parameter.numel() > LARGEST:
                    runs.append([])
                runs[-1].append(parameter)
            for run in (run for runs in held.values() for run in runs):
                if len(run) > 1:
                    self._blocks.append(Block(group, run, self.optimizer.state, COUNTS))
                else:
                    rest += run
            if rest:
                self._rest.append((group, rest))


def _is_plain(optimizer: Optimizer) -> bool:
    """Whether nobody has put code of his own around the step, or asked for another one."""
    held: Any = optimizer
    if held._optimizer_step_pre_hooks or held._optimizer_step_post_hooks:
        return False
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return False
    own: Callable[..., Any] | None = vars(optimizer).get("step")
    if own is not None and not _is_schedulers(own, type(optimizer)):
        return False
    return not any(group.get(name) for group in optimizer.param_groups for name in EXTRAS)


def _is_schedulers(step: Any, kind: type[Optimizer]) -> bool:
    """Whether a step is what torch's learning-rate schedulers make of it: one that remembers that it was called."""
    code = getattr(step, "__code__", None)
    return code is not None and code.co_filename == lr_scheduler.__file__ and step.__wrapped__ is kind.step


def _form(parameter: Tensor, state: Mapping[str, Any] | None) -> Any:
    """What parameters of a block have in common; ``None`` for one that stays by itself."""
    gradient = parameter.grad
    if not state or not isinstance(state, dict) or type(parameter) is not nn.Parameter:
        return None
    if gradient is None or gradient.dtype is not parameter.dtype or gradient.layout is not torch.strided:
        return None
    size = parameter.numel()
    if size % TAILLESS or not 0 < size <= SMALL or not _is_simple(parameter) or not parameter.is_floating_point():
        return None
    found = []
    for name, value in sorted(state.items()):
        if not isinstance(value, Tensor) or not _is_simple(value) or value.requires_grad:
            return None
        if name in COUNTS and value.dim() == 0:
            found.append((name, value.dtype, value.item()))
        elif name not in COUNTS and value.shape == parameter.shape:
            found.append((name, value.dtype, 0.0))
        else:
            return None
    return parameter.dtype, tuple(found)


def _is_simple(tensor: Tensor) -> bool:
    """Numbers on the host, one behind the other."""
    strided = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return strided and tensor.is_contiguous() and not tensor.is_inference() and not tensor.is_conj()
