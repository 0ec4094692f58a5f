"""Other ways to train beside a plan: by hand-made figures, by limits that must hold, and by the command."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_chains import large_chain

from vpipe.errors import UserError
from vpipe.plan.against import Way, compare, round_time, verdict
from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.machine import Machine

MIB = 2**20
LAYER = LayerCost("layer", 1.0, 1.0, 1.0, 100, 10, 50 * MIB, 100 * MIB, update=0.25)
TWO = Profile((LAYER, LAYER), link_bandwidth=50.0 * MIB)


def ways(profile: Profile, num_ranks: int, num_units: int, memory: float | None = None) -> dict[str, Way]:
    machine = Machine.of(num_ranks, memory)
    return {way.name: way for way in compare(["single", "ddp", "fsdp"], profile, machine, num_units)}


def test_by_hand() -> None:
    """Two layers of 3 s and 50 MiB, two ranks, 4 units, 1 s for a layer's weights over the link.

    single: 4 × 6 + 0.5. ddp: 2 × 6 of compute; the reduction takes 2 × (2-1) × (100/2)/50 = 2 s, a quarter of it (one
    bucket of 25 of 100 MiB) after the backward: + 0.5 + 0.5. fsdp, one round of 2 units, half a second a gather:

        link     g0 g1 .... g1 ..... s1 g0 | s0
        compute  .. f0---f1--- b1-------- b0--------
    """
    found = ways(TWO, 2, 4)
    assert found["single"].step_time == 24.5
    assert found["ddp"].step_time == 13.0
    # g0 ends at 0.5; f0 to 2.5, g1 beside it; f1 to 4.5; b1 to 8.5; b0 to 12.5; s0 to 13; half of the update
    assert found["fsdp"].step_time == pytest.approx(13.0 + 0.25)
    assert found["single"].memory == 2 * 200 * MIB + 200
    assert found["ddp"].memory == 2 * 250 * MIB + 200
    assert found["fsdp"].memory == 200 * MIB + 150 * MIB + 2 * 200


@pytest.mark.parametrize("seed", range(20))
def test_limits(seed: int) -> None:
    rng = random.Random(seed)
    profile = large_chain(seed, rng.randint(2, 12))
    ranks, units = rng.randint(2, 6), rng.randint(1, 24)
    found = ways(profile, ranks, units)
    alone = ways(profile, 1, units)
    assert alone["ddp"].step_time == pytest.approx(alone["single"].step_time)
    assert alone["fsdp"].step_time == pytest.approx(alone["single"].step_time)
    fast = ways(replace(profile, link_bandwidth=None, link_latency=0.0), ranks, units)
    work = sum(layer.total for layer in profile.layers)
    update = sum(layer.update for layer in profile.layers)
    assert fast["ddp"].step_time == pytest.approx(-(-units // ranks) * work + update)
    slow = ways(replace(profile, link_bandwidth=profile.link_bandwidth / 10), ranks, units)  # type: ignore[operator]
    for name in ("ddp", "fsdp"):
        assert fast[name].step_time <= found[name].step_time * (1 + 1e-12) <= slow[name].step_time * (1 + 1e-12)
    assert slow["single"].step_time == found["single"].step_time


@pytest.mark.parametrize("seed", range(10))
def test_a_round_takes_at_least_its_compute_and_its_messages(seed: int) -> None:
    profile = large_chain(seed, 6)
    machine = Machine.of(3, None)
    gathers = 3 * sum(machine.reduce_time(profile, range(3), layer.parameter_bytes) / 2 for layer in profile.layers)
    work = 2 * sum(layer.total for layer in profile.layers)
    time = round_time(profile, machine, 2)
    assert max(work, gathers) <= time * (1 + 1e-9) <= (work + gathers) * (1 + 2e-9)


def test_what_fsdp_itself_costs_a_layer_is_counted_for_every_layer_and_round() -> None:
    layers = tuple(LayerCost(f"l{i}", 1.0, 2.0, 3.0, 0, 0, 1000) for i in range(4))
    free = Profile(layers, link_latency=0.5, link_bandwidth=1000.0)
    own = replace(free, shard_overhead=0.25, shard_overhead_per_byte=0.001)
    machine = Machine.of(2, None)
    # work of one unit; a layer's weights twice and its gradients once, half of them and a latency each; FSDP's own
    assert round_time(own, machine, 1) == pytest.approx(4 * 6.0 + 4 * 3 * (0.5 + 0.5) + 4 * (0.25 + 1.0))
    assert round_time(own, machine, 1) > round_time(free, machine, 1)


def test_what_ddp_itself_costs_is_counted_once_a_step_and_beside_nothing() -> None:
    layers = tuple(LayerCost(f"l{i}", 1.0, 2.0, 3.0, 0, 0, 1000) for i in range(4))
    free = Profile(layers, link_latency=0.5, link_bandwidth=1000.0)
    own = replace(free, replica_overhead=0.25, replica_overhead_per_byte=0.001)
    before, after = (ways(each, 2, 8)["ddp"].step_time for each in (free, own))
    # four units a rank; a reduction of 4000 bytes in halves, twice, and two latencies; DDP's own
    assert after == pytest.approx(4 * 24.0 + 2 * (2.0 + 0.5) + 0.25 + 4.0)
    assert before < after


def test_less_memory_means_more_rounds_for_fsdp_and_what_does_not_fit_is_said() -> None:
    roomy = ways(TWO, 2, 8)["fsdp"]
    tight = ways(TWO, 2, 8, memory=roomy.memory - 1)["fsdp"]
    assert tight.fits
    assert tight.memory < roomy.memory
    assert tight.step_time > roomy.step_time
    nothing = ways(TWO, 2, 8, memory=1000)
    assert not any(way.fits for way in nothing.values())
    assert verdict(list(nothing.values()), 1.0).startswith("only the pipeline fits")


def test_verdicts() -> None:
    def way(time: float, fits: bool = True) -> Way:
        return Way("ddp", time, 1, fits, "note")

    assert "wrong tool here: ddp is predicted to be 7.00 times as quick" in verdict([way(1.0)], 7.0)
    assert "about as quick" in verdict([way(1.0)], 1.02)
    assert "the pipeline is predicted to be 2.00 times as quick as ddp" in verdict([way(2.0)], 1.0)


def test_the_command_says_so_for_people_and_machines(vpipe: Any, tmp_path: Path) -> None:
    small = LayerCost("layer", 1e-3, 1e-3, 1e-3, 1000, 1000, 10_000, 20_000)
    path = tmp_path / "profile.json"
    Profile((small,) * 8, link_latency=1e-3, link_bandwidth=1e9).save(path)
    words = ("plan", str(path), "-p", "4", "-m", "8", "--scheduler", "1f1b", "--against", "ddp,fsdp,single")
    said = vpipe(*words)
    assert said.returncode == 0, said.stderr
    assert "a pipeline is the wrong tool here: ddp" in said.stdout
    answer = json.loads(vpipe(*words, "--json").stdout)
    assert [way["name"] for way in answer["against"]] == ["ddp", "fsdp", "single"]
    assert answer["verdict"] in said.stdout
    wrong = vpipe(*words[:-1], "dpp")
    assert wrong.returncode == 2
    assert "did you mean 'ddp'" in wrong.stderr


def test_unknown_ways_are_refused() -> None:
    with pytest.raises(UserError, match="is one of single, ddp, fsdp"):
        compare(["zero"], TWO, Machine.of(2, None), 4)
