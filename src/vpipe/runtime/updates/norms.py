"""The sizes of gradients: what clipping needs, and whether an update may be made.

A gradient may be finite and its norm not (the square of 1e20 is no float32). Such an update is made, as torch makes it;
only a gradient that is itself not finite skips one. Sparse gradients count by the values that they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vpipe.runtime.device import HOST, is_host

NO_GRADIENT = -1.0
OVERFLOWED = -2.0
"""Stands for the norm of a finite gradient that is infinite in the gradient's own precision."""


def norms(parameters: Sequence[Tensor]) -> Tensor:
    """The norm of each parameter's gradient, or ``NO_GRADIENT``; where the gradients are."""
    held = [values_of(p.grad) for p in parameters if p.grad is not None]
    known = torch._foreach_norm(held) if held else []
    if known and len(known) == len(parameters) and len({norm.dtype for norm in known}) == 1:
        return torch.stack(list(known)).double()  # most are alike: converted at once
    found = iter(known)
    sizes = [
        next(found).double()
        if p.grad is not None
        else torch.full((), NO_GRADIENT, dtype=torch.float64, device=p.device)
        for p in parameters
    ]
    return torch.stack(sizes) if sizes else torch.empty(0, dtype=torch.float64)


def norms_there(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """The norms of those gradients that are there, on a device, told apart where the norm alone is infinite; nobody
    waits."""
    held = [values_of(p.grad) for p in parameters if p.grad is not None]
    if not held:
        return torch.empty(0, dtype=torch.float64, device=device)
    found = torch.stack([norm.double() for norm in torch._foreach_norm(held)])
    finite = torch.isfinite(torch.stack(torch._foreach_norm(held, torch.inf)))
    return torch.where(found.isinf() & finite, OVERFLOWED, found)


def values_of(gradient: Tensor) -> Tensor:
    """The numbers of a gradient."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def told_apart(found: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """The norms, now on the host: of those that are infinite, which gradients are not."""
    for place in found.isinf().nonzero().flatten().tolist():
        gradient = parameters[place].grad
        if gradient is not None and bool(torch.isfinite(values_of(gradient)).all()):
            found[place] = OVERFLOWED
    return found


def judge(found: Tensor, dtype: torch.dtype) -> tuple[bool, Tensor]:
    """Whether all gradients are finite, and the norm of all: as ``torch.nn.utils.get_total_norm`` adds them."""
    found = found[found != NO_GRADIENT]
    finite = bool(torch.isfinite(found).all())
    found = torch.where(found == OVERFLOWED, torch.inf, found).to(dtype)
    return finite, torch.linalg.vector_norm(found) if len(found) else torch.zeros((), dtype=dtype)


def judge_there(found: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same of numbers on a device, where both answers stay; all of them are norms."""
    finite = torch.isfinite(found).all()
    return finite, torch.linalg.vector_norm(torch.where(found == OVERFLOWED, torch.inf, found).to(dtype))


def judge_here(parameters: Sequence[Tensor], dtype: torch.dtype) -> tuple[bool | Tensor, Tensor]:
    """The same of one stage; on a device both answers stay there."""
    device = parameters[0].device if parameters else HOST
    if is_host(device):
        return judge(told_apart(norms(parameters), parameters), dtype)
    held = [values_of(p.grad) for p in parameters if p.grad is not None]
    if not held:
        return True, torch.zeros((), dtype=dtype, device=device)
    largest = torch.stack(torch._foreach_norm(held, torch.inf))
    return torch.isfinite(largest).all(), torch.linalg.vector_norm(torch.stack(torch._foreach_norm(held)).to(dtype))


def multiply(gradients: Iterable[Tensor], factor: Tensor | float) -> None:
    """In place, sparse gradients too."""
    held = list(gradients)
    if dense := [gradient for gradient in held if not gradient.is_sparse]:
        torch._foreach_mul_(dense, factor)
    for gradient in held:
        if gradient.is_sparse:
            gradient.mul_(factor)


def divide(gradients: Iterable[Tensor], divisor: float) -> None:
    """In place, sparse gradients too."""
    held = list(gradients)
    if dense := [gradient for gradient in held if not gradient.is_sparse]:
        torch._foreach_div_(dense, divisor)
    for gradient in held:
        if gradient.is_sparse:
            gradient.div_(divisor)
