"""Every schedule on emulated devices equals the CPU to the bit, however the streams run, and the host never waits."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from device_cases import SCHEDULES, TIED, Outcome, assert_equal, plain, trained, with_skip
from torch import nn

from vpipe.schedule import catalog

OPTIONS: list[dict[str, Any]] = [
    {},
    {"recompute": 0.5, "clip_norm": 0.3},
    {"clip_norm": 0.5, "optimizer": "fused"},
    {"recompute": 1.0, "optimizer": "sgd"},
]
"""What turns with the schedules, so that each option meets several of them."""


def layers_for(schedule: str, num_ranks: int) -> list[nn.Module]:
    """Two a rank, up to four ranks, or one a stage: what a run takes is proportional to them."""
    return plain(num_ranks * (2 if num_ranks <= 4 else catalog.get(schedule).stages_per_rank))


def options_of(schedule: str, num_ranks: int) -> dict[str, Any]:
    found = OPTIONS[(SCHEDULES.index(schedule) + num_ranks) % len(OPTIONS)]
    return {**found, "num_ranks": num_ranks, "num_microbatches": max(4, num_ranks)}


@lru_cache(maxsize=64)
def on_cpu(schedule: str, num_ranks: int) -> Outcome:
    return trained(layers_for(schedule, num_ranks), "cpu", schedule, **options_of(schedule, num_ranks))


def assert_devices_equal(schedule: str, num_ranks: int) -> None:
    found = trained(layers_for(schedule, num_ranks), "emu", schedule, **options_of(schedule, num_ranks))
    assert_equal(found, on_cpu(schedule, num_ranks))


@pytest.mark.slow
@pytest.mark.rotates(24)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_on_two_devices(schedule: str, mode: str) -> None:
    assert_devices_equal(schedule, 2)


@pytest.mark.slow
@pytest.mark.rotates(6)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe-v", "hanayo", "pipedream", "pipedream-2bw"])
def test_four_devices(schedule: str, mode: str) -> None:
    assert_devices_equal(schedule, 4)


WHOLE = [
    (schedule, ranks, mode)
    for schedule in SCHEDULES
    for ranks in (4, 8)
    for mode in ("as-is", "lazy", "delays", "harsh")
]


@pytest.mark.slow
@pytest.mark.rotates(8)
@pytest.mark.parametrize(("schedule", "num_ranks", "mode_name"), WHOLE)
def test_every_schedule_on_more_devices(schedule: str, num_ranks: int, mode_name: str, emulated: Any) -> None:
    emulated.settings(**emulated.MODES[mode_name])
    assert_devices_equal(schedule, num_ranks)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "swapped": ("1f1b", {"swap": 1.0, "num_ranks": 2}),
    "swapped and recomputed": ("eager-1f1b", {"swap": 0.5, "recompute": 0.5, "num_ranks": 2}),
    "swapped versions": ("pipedream", {"swap": 1.0, "num_ranks": 3}),
    "replicas": ("1f1b", {"replicas": 2, "num_ranks": 4}),
    "replicas of rounds": ("pipedream", {"replicas": [2, 1], "num_ranks": 3}),
    "replicas in any order": ("1f1b", {"replicas": 2, "num_ranks": 4, "exact_reduction": False}),
    "replicas of several stages": ("interleaved", {"replicas": 2, "num_ranks": 4}),
    "tied": ("zb-h1", {"tied": TIED, "num_ranks": 4, "clip_norm": 0.2}),
    "shared device": ("1f1b", {"num_ranks": 3, "device": "emu:1"}),
    "one rank": ("1f1b", {"num_ranks": 1}),
}


@pytest.mark.slow
@pytest.mark.rotates(9)
@pytest.mark.parametrize("name", CASES)
def test_what_goes_with_schedules(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vpipe.runtime.memory.swap.MIN_BYTES", 64)
    schedule, options = CASES[name]
    device = options.get("device", "emu")
    options = {key: value for key, value in options.items() if key != "device"}
    layers = plain(8 if "tied" in options else 4)
    assert_equal(trained(layers, device, schedule, **options), trained(layers, "cpu", schedule, **options))


def test_skips_over_stages(mode: str) -> None:
    options = {"num_ranks": 4, "recompute": 0.5}
    assert_equal(trained(with_skip(), "emu", "1f1b", **options), trained(with_skip(), "cpu", "1f1b", **options))


def test_random_numbers_do_not_depend_on_placement() -> None:
    """Those of a device are not those of the CPU; but one device and four, with recompute or without, draw alike."""
    layers = plain(dropout=0.3)
    one = trained(layers, "emu:0", "1f1b", num_ranks=1)
    assert_equal(trained(layers, "emu", "zb-h1", num_ranks=4, recompute=0.5), one)
    assert_equal(trained(layers, "emu", "interleaved", num_ranks=2), one)
    assert one.losses != trained(layers, "cpu", "1f1b", num_ranks=1).losses


def test_callers_keep_their_random_state_and_their_device() -> None:
    places = [f"emu:{index}" for index in (0, 1, 2)]
    torch.manual_seed(1)
    expected = [torch.rand(3, device=place).cpu() for place in places]
    layers = plain(dropout=0.3)
    torch.manual_seed(1)
    trained(layers, "emu", "1f1b", num_ranks=2)
    trained(layers, "emu:2", "1f1b", num_ranks=1)
    assert torch.accelerator.current_device_index() == 0
    found = [torch.rand(3, device=place).cpu() for place in places]  # not seeded again: training has put it back
    assert all(map(torch.equal, found, expected))
