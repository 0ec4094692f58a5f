"""Checks of sizes that several models share, so that a wrong number is one sentence instead of a shape error in the
tenth layer."""

from __future__ import annotations

from vpipe.errors import UserError


def positive(**sizes: int) -> None:
    """Every size is at least 1."""
    for name, size in sizes.items():
        if size < 1:
            remedy = "; give it, or take it from the data set" if name == "vocab_size" else ""
            raise UserError(f"model.{name} is {size} but must be at least 1{remedy}")


def head_size_of(hidden_size: int, num_heads: int) -> int:
    """The size of a head that divides ``hidden_size`` evenly."""
    positive(num_heads=num_heads)
    if hidden_size % num_heads:
        fitting = [heads for heads in range(1, hidden_size + 1) if hidden_size % heads == 0]
        near = min(fitting, key=lambda heads: abs(heads - num_heads))
        raise UserError(
            f"model.hidden_size {hidden_size} is not divisible by model.num_heads {num_heads}; {near} heads would fit"
        )
    return hidden_size // num_heads


def fits(length: int, sequence_length: int) -> None:
    """A sequence is not longer than the learned positions."""
    if length > sequence_length:
        raise UserError(
            f"a sequence has {length} tokens but model.sequence_length is {sequence_length}; raise it or cut the data"
        )
