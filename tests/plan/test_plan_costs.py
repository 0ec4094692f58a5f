"""Profiles: what is read is what was written, and every fault names the file and the key."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from vpipe.errors import UserError
from vpipe.plan.costs import LayerCost, Profile, load_profile, profile_from_json
from vpipe.plan.links import Links, links_from_json
from vpipe.plan.machine import Machine
from vpipe.plan.pipe import Pipe
from vpipe.plan.sites import stage_sites
from vpipe.plan.units import format_bytes, format_seconds, parse_bytes

LAYERS = (
    LayerCost("embedding", 1e-3, 0.0, 2e-3, 4096, 4096, 1 << 20, 2 << 20),
    LayerCost("block", 5e-3, 5e-3, 5e-3, 65536, 4096, 1 << 19, 1 << 20, spread=0.02),
)
PROFILE = Profile(
    LAYERS,
    input_bytes=512,
    microbatch_rows=4,
    link_latency=1e-4,
    link_bandwidth=1e9,
    model="gpt",
    device={"name": "cpu"},
)


def test_a_profile_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert load_profile(path) == PROFILE
    path.write_text(path.read_text().replace("65536", "6.5536e4"))
    assert load_profile(path) == PROFILE, "a size as people write it"


def test_the_cuts_are_the_input_and_every_boundary() -> None:
    assert PROFILE.cut_bytes == (512, 4096, 4096)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["layers"][1].update(forward=math.nan), "layers[1].forward is nan"),
        (lambda d: d["layers"][1].update(saved_bytes=-5), "layers[1].saved_bytes is -5"),
        (lambda d: d["layers"][0].pop("boundary_bytes"), "layers[0].boundary_bytes is missing"),
        (lambda d: d["layers"][0].update(foward=d["layers"][0].pop("forward")), "did you mean 'forward'"),
        (lambda d: d.update(link_latncy=1.0), "link_latncy is no key here; did you mean 'link_latency'"),
        (lambda d: d["layers"][0].update(forward=2e9), "layers[0].forward is 2000000000"),
        (lambda d: d.update(model=7), "model is 7: Input should be a valid string; measure again or correct the file"),
        (lambda d: d.update(link_bandwidth=0), "link_bandwidth is 0"),
        (lambda d: d.update(link_latency="fast"), "link_latency is 'fast'"),
        (lambda d: d.update(microbatch_rows=0.5), "microbatch_rows is 0.5: Input should be a valid integer"),
        (
            lambda d: d.update(device={"memory_bytes": "lots"}),
            "device.memory_bytes is 'lots': Input should be a valid integer",
        ),
        (lambda d: d.update(layers=[]), "at least one layer"),
        (lambda d: d.update(format="something"), "not a profile"),
        (lambda d: d["layers"].__setitem__(0, 7), "layers[0] is 7: Input should be an object"),
    ],
)
def test_bad_profiles_are_refused_by_file_and_key(change: object, words: str, tmp_path: Path) -> None:
    data = PROFILE.to_json()
    change(data)  # type: ignore[operator]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError) as error:
        load_profile(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_missing_and_unreadable_files() -> None:
    with pytest.raises(UserError, match="there is no such profile"):
        load_profile("/nowhere/profile.json")
    with pytest.raises(UserError, match="not a profile"):
        profile_from_json([1, 2])


def test_the_table_names_every_layer_and_the_machine() -> None:
    table = PROFILE.table()
    assert "embedding" in table
    assert "5.00 ms" in table
    assert "64.0 KiB" in table
    assert table.splitlines()[-1].startswith("microbatch of 4 rows; link 954 MiB/s")


def test_scaling_rows_scales_times_and_activations_but_not_weights() -> None:
    half = PROFILE.scaled(2)
    assert half.layers[1].forward == pytest.approx(2.5e-3)
    assert half.layers[1].saved_bytes == 32768
    assert half.layers[1].parameter_bytes == 1 << 19


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 << 30), ("512 MB", 512_000_000), ("1.5KiB", 1536), ("1000", 1000), (77, 77), ("2g", None)],
)
def test_memory_as_people_write_it(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(UserError, match="no size"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["4 gigs", "", "GiB", "-4GiB", "0", float("nan"), True])
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="memory is"):
        parse_bytes(text)


def test_numbers_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 30)] == ["0 B", "1023 B", "1.50 KiB", "5.00 GiB"]
    assert [format_seconds(t) for t in (2.5, 0.0125, 3e-6)] == ["2.50 s", "12.5 ms", "3.00 µs"]


def test_what_passes_several_boundaries_waits_for_all_and_goes_as_fast_as_the_narrowest() -> None:
    links = links_from_json({"latency": [1e-3, 2e-3, 4e-3], "bandwidth": [1e9, 2e7, 5e8]}, "links.json")
    assert links.latency is not None
    assert links.bandwidth is not None
    assert [row[0] for row in links.latency] == pytest.approx([0, 1e-3, 3e-3, 7e-3])
    assert links.bandwidth[0][1:] == (1e9, 2e7, 2e7)
    assert links.bandwidth[3][:3] == (2e7, 2e7, 5e8)


def test_groups_of_replicas_wait_for_their_slowest_pair() -> None:
    """Stage 0 on ranks 0 and 2, stage 1 on ranks 1 and 3: some ways are longer and narrower than the others."""
    slow = {(2, 3), (1, 3)}
    latency = tuple(tuple(9e-3 if (a, b) in slow else 1e-3 for b in range(4)) for a in range(4))
    bandwidth = tuple(tuple(1e6 if (a, b) in slow else 1e9 for b in range(4)) for a in range(4))
    machine = Machine.of(4, None, links=Links(latency, bandwidth))
    first, second = stage_sites(PROFILE, Pipe.of("1f1b", 2, 4, replicas=(2, 2)), machine)
    assert (first.ahead.latency, first.ahead.per_byte) == (9e-3, 1e-6)
    assert (second.back.latency, second.back.per_byte) == (1e-3, 1e-9)
    assert first.reduce == pytest.approx((2 * 1e-3, 1e-9))
    assert second.reduce == pytest.approx((2 * 9e-3, 1e-6))
