"""Options of a schedule live in one place, its author: a config gives them by name, and its entry checks them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from train_runs import Run, tiny

import vpipe
from vpipe.errors import UserError
from vpipe.registry import SCHEDULE_REGISTRY
from vpipe.schedule.catalog import entries, get
from vpipe.schedule.entry import Chain
from vpipe.schedule.gpipe import gpipe
from vpipe.schedule.one_f_one_b import one_f_one_b
from vpipe.schedule.program import Program

SOURCES = Path(vpipe.__file__).parent


def seen(changes: dict[str, Any], folder: Path) -> Program:
    """The program that a run of this config would execute."""
    return Run(tiny(changes), folder).trainer.session.pipeline.programs.spec.program


@pytest.fixture
def shifting() -> Iterator[list[int]]:
    """A schedule of another package with an option that nothing else has heard of."""
    told: list[int] = []

    def author(num_ranks: int, num_microbatches: int, *, shift: int = 0) -> Program:
        told.append(shift)
        return (gpipe if shift else one_f_one_b)(num_ranks, num_microbatches)

    before = dict(SCHEDULE_REGISTRY._entries)
    SCHEDULE_REGISTRY.register("shifting")(author)
    yield told
    SCHEDULE_REGISTRY._entries.clear()
    SCHEDULE_REGISTRY._entries.update(before)


def test_a_new_option_touches_one_file(shifting: list[int], tmp_path: Path) -> None:
    program = seen({"parallel.scheduler": "shifting", "parallel.schedule_options": {"shift": 2}}, tmp_path)
    assert program == gpipe(2, 4)
    assert set(shifting) == {2}


def test_older_keys_are_the_same_options(tmp_path: Path) -> None:
    waves = {"parallel.scheduler": "hanayo", "model.num_layers": 8}
    expected = seen(waves | {"parallel.waves": 2}, tmp_path / "a")
    assert seen(waves | {"parallel.schedule_options": {"num_waves": 2}}, tmp_path / "b") == expected
    units = {"parallel.scheduler": "pipedream", "parallel.schedule_options": {"update_interval": 2}}
    assert seen(units, tmp_path / "c") == get("pipedream").build(2, 4, update_interval=2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel.schedule_options": {"depths": [1, 0]}}, "1f1b has no option 'depths'; it has none"),
        (
            {"parallel.scheduler": "pipedream", "parallel.schedule_options": {"depth": [1, 0]}},
            "pipedream has no option 'depth'; did you mean 'depths'?",
        ),
        (
            {
                "parallel.scheduler": "pipedream",
                "training.update_interval": 2,
                "parallel.schedule_options": {"update_interval": 4},
            },
            "has update_interval: 4, but training.update_interval is 2; give one of them",
        ),
        (
            {"parallel.scheduler": "pipedream-2bw", "parallel.schedule_options": {"num_batches": 2}},
            "has num_batches, which a run chooses itself",
        ),
        (
            {"parallel.scheduler": "pipedream", "parallel.schedule_options": {"vertical_sync": "no"}},
            "vertical_sync must be true or false, not 'no'",
        ),
        ({"parallel.schedule_options": {"x": float("inf")}}, "parallel.schedule_options"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        seen(changes, tmp_path)
    assert words in str(caught.value)


def test_traits() -> None:
    assert {each.name for each in entries() if each.asynchronous} == {"pipedream", "pipedream-2bw"}
    assert get("pipedream").chains is Chain.UNITS
    assert get("2bw").chains is Chain.BATCHES
    assert get("1f1b").chains is Chain.NOT
    assert get("async_threaded").runs_threads("async_threaded")
    assert not get("gpipe").runs_threads("gpipe")
    assert {each.name for each in entries() if each.two_ways} == {"chimera", "dualpipe"}


def test_nobody_outside_asks_for_a_schedule_by_its_name_or_mode() -> None:
    """What a schedule is, its entry says. (``config`` knows its own older keys; importers know old words.)"""
    asking = re.compile(
        r"\.mode\s*[!=]=|\.mode\s+(not )?in \(|[!=]=\s*\"(async_threaded|pipedream|naive)\"|\"num_batches\"\s+in"
    )
    found = [
        f"{path.relative_to(SOURCES)}: {line.strip()}"
        for path in sorted(SOURCES.rglob("*.py"))
        if path.relative_to(SOURCES).parts[0] not in ("schedule", "config")
        for line in path.read_text(encoding="utf-8").splitlines()
        if asking.search(line)
    ]
    assert not found
