"""Layers that users might write, put together at random: plain torch, without a word of the engine's.

A layer takes and gives (rows, LENGTH, WIDTH) of float32. ``Steps`` runs a few of the pieces below one after the other;
``Wrapped`` runs them inside a checkpoint, an autocast, a derivative …
"""

from __future__ import annotations

import types
from random import Random
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LENGTH, WIDTH = 3, 4


class Piece(nn.Module):
    """One step; ``dice`` decides about its variants."""

    def __init__(self, dice: Random) -> None:
        super().__init__()
        self.variant = dice.randrange(12)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=dice.random() < 0.7)
        self.frozen = dice.random() < 0.1
        if self.frozen:
            self.linear.weight.requires_grad_(False)


class InPlace(Piece):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        match self.variant:
            case 0:
                y += x
            case 1:
                y.relu_()
            case 2:
                y[:, 0] = 0
            case 3:
                y.masked_fill_(y < 0, 0.1)
            case 4:
                y.view(-1)[::2].mul_(0.5)
            case 5:
                y[..., :2].tanh_()
            case 6:
                y.transpose(0, 1)[0].sigmoid_()
            case 7:
                y.mul_(y.detach().abs() + 0.5).add_(1.0)
            case 8:
                y[0].copy_(x[0])
            case 9:
                y = functional.gelu(y)
                y -= x.mean()
            case 10:
                nn.functional.dropout(y, 0.0, training=True, inplace=True)
            case _:
                y.narrow(-1, 0, 2).neg_()
        return y


class Flat(Piece):
    """The Linear gets two dimensions, and the result is changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.reshape(-1, WIDTH))
        if self.variant % 3 == 0:
            y.relu_()
        elif self.variant % 3 == 1:
            y += 0.5
        return y.view(x.shape)


class Strides(Piece):
    """Inputs that are not contiguous, broadcast, or without a batch."""

    def forward(self, x: Tensor) -> Tensor:
        match self.variant % 5:
            case 0:
                return self.linear(x.transpose(0, 1)).transpose(0, 1)
            case 1:
                return torch.stack([self.linear(row) for row in x])
            case 2:
                return self.linear(x.mean(1, keepdim=True).expand(x.shape))
            case 3:
                return self.linear(x.mT.contiguous().mT)
            case _:
                return torch.cat([self.linear(part) for part in x.split(1, 1)], 1)


class Functional(Piece):
    """The weight is used by hand, here and there as a view of it, or in parts."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.linear.weight
        match self.variant:
            case 0:
                return x @ w
            case 1:
                return x @ w.t()
            case 2:
                return (w @ x.mT).mT
            case 3:
                return x @ w.T.contiguous()
            case 4:
                return functional.linear(self.linear(x).tanh(), w)
            case 5:
                rows = x.reshape(-1, WIDTH)
                return torch.addmm(x.reshape(-1, WIDTH), rows, w, beta=0.5, alpha=2.0).view(x.shape)
            case 6:
                return torch.cat([x @ part.t() for part in w.chunk(2)], -1)
            case 7:
                return torch.einsum("rlw,vw->rlv", x, w)
            case 8:
                return x @ (w @ w)
            case 9:
                return self.linear(x) * w.sum()
            case 10:
                return torch.bmm(x, w.expand(len(x), WIDTH, WIDTH))
            case _:
                return x @ torch.stack([w[0], w[1], w[2], w[3]])


class Shared(Piece):
    """One Linear used several times, and two that share a weight."""

    def __init__(self, dice: Random) -> None:
        super().__init__(dice)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.linear.weight
        self.num_uses = dice.randint(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_uses):
            x = x + self.linear(x.tanh())
            if self.variant % 2:
                x = self.other(x)
        return x


class Norm(Piece):
    def __init__(self, dice: Random) -> None:
        super().__init__(dice)
        self.norm = [
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH, bias=False),
            nn.LayerNorm((LENGTH, WIDTH)),
            nn.RMSNorm(WIDTH),
            nn.BatchNorm1d(LENGTH),
            nn.GroupNorm(1, LENGTH),
        ][self.variant % 6]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        return y.relu_() if self.variant > 5 else y


class Convolved(Piece):
    def __init__(self, dice: Random) -> None:
        super().__init__(dice)
        channels = 2 if self.variant % 2 else 1
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=channels, bias=self.variant > 3)
        if self.variant > 8:
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding="same", padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT).mT + self.linear(x)


class Looked(Piece):
    """An embedding whose indices depend on the input."""

    def __init__(self, dice: Random) -> None:
        super().__init__(dice)
        self.table = nn.Embedding(5, WIDTH, padding_idx=1 if self.variant % 2 else None)

    def forward(self, x: Tensor) -> Tensor:
        index = (x.detach().sum(-1) * 3).long() % 5
        return self.table(index) + self.linear(x)


class OtherTypes(Piece):
    def __init__(self, dice: Random) -> None:
        super().__init__(dice)
        kinds = [torch.float64, torch.bfloat16, torch.complex64, torch.complex128, torch.float16]
        self.kind = kinds[self.variant % 5]
        self.typed = nn.Linear(WIDTH, WIDTH, dtype=self.kind)

    def forward(self, x: Tensor) -> Tensor:
        y = self.typed(x.to(self.kind))
        y += 0.25
        return (y.real + y.imag if y.is_complex() else y).float()


class Derived(Piece):
    """A derivative inside the forward, sometimes one that is differentiated again; vmap and jacrev."""

    def forward(self, x: Tensor) -> Tensor:
        match self.variant % 4:
            case 0:
                z = x.detach().requires_grad_()
                (g,) = torch.autograd.grad(self.linear(z).square().sum(), z)
                return self.linear(x) + 0.1 * g
            case 1:
                z = x.clone() if x.requires_grad else x.clone().requires_grad_()
                (g,) = torch.autograd.grad(self.linear(z).square().sum(), z, create_graph=True)
                return x + 0.1 * g
            case 2:
                return torch.func.vmap(self.linear)(x)
            case _:
                jacobian = torch.func.jacrev(lambda row: self.linear(row).square())(x[0, 0].detach())
                return x @ jacobian


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * dy * weight, (2 * dy * x).sum((0, 1))


class Waiting(torch.autograd.Function):
    """Takes part in the split."""

    deferrable = (1,)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        defer = getattr(ctx, "defer", None)
        if defer is None:
            return dy * weight, (dy * x).sum((0, 1))
        defer(lambda: (None, (dy * x).sum((0, 1))))
        return dy * weight, None


class Custom(Piece):
    def __init__(self, dice: Random) -> None:
        super().__init__(dice)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        own: Any = Doubled if self.variant % 2 else Waiting
        y = self.linear(own.apply(x, self.scale))
        return own.apply(y, self.scale) if self.variant > 6 else y


class Hooked(Piece):
    """Hooks that change gradients or count them; ``num_calls`` is compared too."""

    def __init__(self, dice: Random) -> None:
        super().__init__(dice)
        self.num_calls = 0
        weight = self.linear.weight
        match self.variant:
            case 0 if weight.requires_grad:
                weight.register_hook(lambda grad: self.count() or grad * 0.5)
            case 1 if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(lambda _: self.count())
            case 2:
                self.linear.register_full_backward_hook(lambda *_: self.count())
            case 3:
                self.linear.register_forward_hook(lambda _, __, y: y * 2)
            case 4:
                self.linear.register_full_backward_pre_hook(lambda _, grads: (self.count() or grads[0] * 0.5,))
            case 10:
                self.linear.register_backward_hook(lambda *_: self.count())

    def count(self) -> None:
        self.num_calls += 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if not y.requires_grad:
            return y
        if self.variant == 5:
            y.register_hook(lambda grad: self.count() or grad * 3)
        elif self.variant == 6:
            y.grad_fn.register_hook(lambda *_: self.count())
        elif self.variant == 7:
            y = self.linear(x.reshape(-1, WIDTH))
            y.grad_fn.register_hook(lambda grads, _: tuple(grad if grad is None else grad * 2 for grad in grads))
            y = y.view(x.shape)
        elif self.variant == 8:
            transposed = self.linear.weight.t()
            if transposed.requires_grad:
                transposed.register_hook(lambda grad: grad * 0.25)
            y = x @ transposed
        elif self.variant == 9:
            y = self.linear(x.reshape(-1, WIDTH))
            y.register_hook(lambda grad: self.count() or grad * 0.5)
            y = y.view(x.shape)
        return y


class Buffered(Piece):
    def __init__(self, dice: Random) -> None:
        super().__init__(dice)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return self.linear(x - self.mean)


class Moody(Piece):
    """The graph depends on the data, so units of a step differ."""

    def __init__(self, dice: Random) -> None:
        super().__init__(dice)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if float(x.sum()) > 0:
            y = self.other(y) * self.linear.weight.sum() if self.variant % 2 else self.linear(y.tanh())
        return y


class Normed(Piece):
    """Weights that are made of others."""

    def __init__(self, dice: Random) -> None:
        super().__init__(dice)
        if self.variant % 2:
            nn.utils.parametrizations.weight_norm(self.linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class OwnForward(Piece):
    """A forward that is set on the instance."""

    def __init__(self, dice: Random) -> None:
        super().__init__(dice)
        self.linear.forward = types.MethodType(lambda module, x: 3 * nn.Linear.forward(module, x), self.linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


PIECES: list[type[Piece]] = [
    *(InPlace, Flat, Strides, Functional, Shared, Norm, Convolved, Looked, OtherTypes, Derived, Custom, Hooked),
    *(Buffered, Moody, Normed, OwnForward),
]


class Steps(nn.Module):
    """A random layer."""

    def __init__(self, seed: int, dice: Random | None = None) -> None:
        super().__init__()
        dice = dice or Random(seed)
        torch.manual_seed(seed)
        kinds = [dice.choice([*PIECES, InPlace, InPlace]) for _ in range(dice.randint(1, 2))]
        self.pieces = nn.ModuleList(kind(dice) for kind in kinds)
        self.context = dice.choice(["", "", "", "", "", "autocast", "checkpoint", "reentrant", "twice"])
        again = self.context in ("checkpoint", "reentrant")
        if again and any(isinstance(piece, Buffered | Norm | Hooked | Derived) for piece in self.pieces):
            # A second forward changes buffers once more, at a time that the schedule decides; torch refuses derivatives.
            self.context = ""
        self.squash = dice.random() < 0.7

    def inner(self, x: Tensor) -> Tensor:
        for piece in self.pieces:
            x = piece(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        match self.context:
            case "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    y = self.inner(x)
            case "checkpoint":
                y = checkpoint(self.inner, x, use_reentrant=False)
            case "reentrant":
                y = checkpoint(self.inner, x, use_reentrant=True)
            case "twice":
                y = self.inner(self.inner(x).tanh())
            case _:
                y = self.inner(x)
        y = torch.tanh(y.float()) if self.squash else y.float() / 2
        return y

    def describe(self) -> str:
        pieces = ", ".join(f"{type(piece).__name__} {piece.variant}" for piece in self.pieces)
        return f"{self.context}({pieces})"
