"""A forgotten wait gives wrong numbers in at least one mode; the right program gives right ones in all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

N = 4096
NUMBERS = count(1)
Program = Callable[[Any, bool, torch.Stream], bool]
"""(device module, whether it waits, side stream) → whether the result is right."""


def side_copy_used_early(emulated: Any, waits: bool, side: torch.Stream) -> bool:
    # A new number each time: memory that is handed out again may still hold the last one.
    main, source = torch.accelerator.current_stream(0), torch.full((N,), float(next(NUMBERS))).pin_memory()
    with side:
        copied = source.to("emu:0", non_blocking=True)
    if waits:
        main.wait_stream(side)
        copied.record_stream(main)
    return torch.equal((copied * 2).cpu(), source * 2)


def side_stream_reads_early(emulated: Any, waits: bool, side: torch.Stream) -> bool:
    x = torch.zeros(N, device="emu:0")
    main = torch.accelerator.current_stream(0)
    torch.accelerator.synchronize(0)
    emulated.native.sleep(1000)
    x.add_(1)
    if waits:
        side.wait_stream(main)
        x.record_stream(side)
    with side:
        y = x + 1
    main.wait_stream(side)
    return bool((y.cpu() == 2).all())


def pinned_buffer_read_early(emulated: Any, waits: bool, side: torch.Stream) -> bool:
    x, host = torch.full((N,), 7.0, device="emu:0"), torch.zeros(N, pin_memory=True)
    side.wait_stream(torch.accelerator.current_stream(0))
    with side:
        host.copy_(x, non_blocking=True)
        event = side.record_event()
    x.record_stream(side)
    if waits:
        event.synchronize()
    seen = host.clone()
    torch.accelerator.synchronize(0)
    return bool((seen == 7).all())


def pinned_source_overwritten(emulated: Any, waits: bool, side: torch.Stream) -> bool:
    source = torch.full((N,), 1.0).pin_memory()
    with side:
        copied = source.to("emu:0", non_blocking=True)
        event = side.record_event()
    if waits:
        event.synchronize()
    source.fill_(2.0)
    torch.accelerator.synchronize(0)
    return bool((copied.cpu() == 1).all())


def freed_without_record_stream(emulated: Any, waits: bool, side: torch.Stream) -> bool:
    x = torch.full((N,), 3.0, device="emu:0")
    main = torch.accelerator.current_stream(0)
    side.wait_stream(main)
    with side:
        emulated.native.sleep(1000)
        y = x * 1
    if waits:
        x.record_stream(side)
    del x  # back to the main stream's pool
    torch.full((N,), 9.0, device="emu:0")  # which hands it out again
    main.wait_stream(side)
    return bool((y.cpu() == 3).all())


def gradient_of_a_side_stream(emulated: Any, waits: bool, side: torch.Stream) -> bool:
    w = torch.ones(256, device="emu:0", requires_grad=True)
    main = torch.accelerator.current_stream(0)
    side.wait_stream(main)
    with side:
        (gradient,) = torch.autograd.grad((w * 3).sum(), w)
    if waits:
        main.wait_stream(side)
    found = (gradient + 0).cpu()
    torch.accelerator.synchronize(0)
    return bool((found == 3).all())


PROGRAMS = [
    side_copy_used_early,
    side_stream_reads_early,
    pinned_buffer_read_early,
    pinned_source_overwritten,
    freed_without_record_stream,
    gradient_of_a_side_stream,
]


def num_wrong(emulated: Any, program: Program, waits: bool, tries: int) -> dict[str, int]:
    found, side = {}, torch.Stream("emu:0")
    for mode, settings in emulated.MODES.items():
        emulated.reset()
        emulated.settings(**settings)
        found[mode] = sum(not program(emulated, waits, side) for _ in range(tries))
        torch.accelerator.synchronize(0)
    return found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_forgotten_wait_shows_and_a_right_program_is_right(emulated: Any, program: Program) -> None:
    assert not any(num_wrong(emulated, program, True, 6).values())
    assert any(num_wrong(emulated, program, False, 6).values())
