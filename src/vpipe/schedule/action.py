"""The instruction set of a pipeline.

A schedule is data: for each rank a list of tiny actions. The text form is torch's, ``[stage][kind][microbatch]``, so
that schedules travel both ways: ``2F0`` is the forward of microbatch 0 at stage 2, ``2STEP`` the optimizer update of
stage 2.

Words: docs/glossary.md.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action does. Authors of schedules write only ``F B I W STEP``; lowering adds the rest.

    At ``REDUCE`` and ``AGREE`` ranks meet: none goes on before all members have come (``semantics.members``).
    """

    __hash__ = str.__hash__  # Enum's own is a Python function; programs have millions of actions

    F = "F"
    """Roughly: ``y = stage(x)``."""
    B = "B"
    """Roughly: ``dx, dw = backward(dy)``. By law ``B`` is ``I`` followed by ``W``."""
    I = "I"
    """Roughly: ``dx = backward(dy)``, remembering what ``W`` needs."""
    W = "W"
    """Roughly: ``dw += what I remembered``."""
    SEND_F = "SEND_F"
    """Roughly: ``isend(y, next stages)``."""
    RECV_F = "RECV_F"
    """Roughly: ``x = irecv(previous stages)``: posted here, awaited by ``F``."""
    SEND_B = "SEND_B"
    """Roughly: ``isend(dx, previous stages)``."""
    RECV_B = "RECV_B"
    """Roughly: ``dy = irecv(next stages)``: posted here, awaited by ``B`` or ``I``."""
    R = "R"
    """Roughly: ``y = stage(x)`` once more, this time keeping what the backward needs."""
    OUT = "OUT"
    """Roughly: ``saved.to(host)``, in the background."""
    IN = "IN"
    """Roughly: ``saved.to(device)``, in the background, awaited by ``B`` or ``I``."""
    REDUCE = "REDUCE"
    """Roughly: ``dw = sum(dw of the stage's replicas)``."""
    AGREE = "AGREE"
    """Roughly: ``verdict = all_gather(norms of all gradients)``: whether to update, and by what factor to clip."""
    STEP = "STEP"
    """Roughly: ``optimizer.step()``: the stage's next weight version."""


class Action(NamedTuple):
    """One thing that one rank does. ``microbatch`` is -1 for the actions of a whole stage (``REDUCE``,
    ``STEP``), and for ``AGREE``, which a rank does once for all its stages and which is written with the first of
    them."""

    stage: int
    kind: Kind
    microbatch: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch < 0 else self.microbatch}"


OF_A_STAGE = frozenset({Kind.REDUCE, Kind.AGREE, Kind.STEP})
"""Kinds that carry no microbatch."""

_TEXT = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE|AGREE|STEP|OUT|IN|F|B|I|W|R)(\d*)")


def parse(text: str) -> Action:
    """The action that ``text`` writes; ``ValueError`` where it writes none."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an action such as 0F3, 1SEND_F0 or 2STEP")
    stage, kind, microbatch = match.groups()
    if (Kind(kind) in OF_A_STAGE) == bool(microbatch):
        wants = "no microbatch" if microbatch else "a microbatch"
        raise ValueError(f"{text!r} is not an action: {kind} takes {wants}")
    return Action(int(stage), Kind(kind), int(microbatch) if microbatch else -1)
