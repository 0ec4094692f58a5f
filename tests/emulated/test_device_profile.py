"""``vpipe profile`` measures the device, not how fast the host hands work over; a plan's cap is the device's memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from emulated_ranks import on_ranks
from torch import nn

from vpipe.cli.plan import command as plan
from vpipe.layer import Layer
from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.profile import Measuring, measure_layers
from vpipe.plan.transfer import measure_swap

DEVICE = "emu:0"


def test_layers_cost_what_their_kernels_take(emulated: Any) -> None:
    """A matrix product of 20 ms: one forward, one for each gradient; the host only hands them over."""
    for name in ("aten::mm", "aten::addmm"):
        emulated.native.set_cost(name, 20_000)
    measuring = Measuring(
        nn.functional.mse_loss, lambda ps: torch.optim.SGD(ps, lr=0.1), repeat=2, device=torch.device(DEVICE)
    )
    layers = [Layer(nn.Linear(8, 8)), Layer(nn.Linear(8, 8))]
    costs, _ = measure_layers(layers, torch.randn(4, 8), torch.randn(4, 8), measuring)
    for name in ("aten::mm", "aten::addmm"):
        emulated.native.set_cost(name, -1)
    assert costs[1].forward > 0.015
    assert costs[1].input_grad + costs[1].weight_grad > 0.035
    assert costs[1].parameter_bytes == 4 * (64 + 8)


def test_swap_is_measured_on_the_device(emulated: Any) -> None:
    emulated.settings(copy_bytes_per_us=1000)
    assert measure_swap(1, torch.device(DEVICE)) < 1.01e9, "a byte a nanosecond"


def link(rank: int) -> Any:
    import emulated_device as emulated
    from transport_suite import between_devices

    from vpipe.plan.transfer import measure_link

    device = torch.device("emu", rank)
    transport = between_devices(device)
    emulated.settings(link_latency_us=5000, link_bytes_per_us=40)
    found = measure_link(transport, 1, device)
    return found.latency, found.bandwidth


@pytest.mark.slow
def test_links_are_measured_between_devices() -> None:
    """A message of 4 MiB takes a tenth of a second, so what the machine does beside it hardly counts."""
    found = on_ranks(link, 2, timeout=120)
    assert not any(isinstance(each, str) for each in found), found
    for latency, bandwidth in found:
        assert latency > 0.004
        assert 40e6 / 2 < bandwidth < 40e6 * 2, "as it was set: 40 bytes a microsecond"


def test_the_cap_of_a_plan_is_the_memory_of_the_device(tmp_path: Path) -> None:
    layer = LayerCost("x", 1.0, 1.0, 1.0, saved_bytes=1 << 20, boundary_bytes=1, parameter_bytes=1 << 20)
    for own, code in ({"memory_bytes": 64 << 20}, 0), ({"memory_bytes": 1 << 20}, 1):
        profile = Profile((layer,) * 4, microbatch_rows=1, device=own)
        (tmp_path / "profile.json").write_text(json.dumps(profile.to_json()))
        found = CliRunner().invoke(plan, [str(tmp_path / "profile.json"), "-p", "2", "-m", "4", "--scheduler", "1f1b"])
        assert bool(found.exit_code) is bool(code), found.output
