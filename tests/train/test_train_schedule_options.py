"""Options of a schedule live in one place, its author: a config gives them by name, and its entry checks them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from train_runs import Run, tiny

import vpipe
from vpipe.cli.main import main
from vpipe.errors import UserError
from vpipe.registry import SCHEDULE_REGISTRY
from vpipe.schedule.authors.authoring import Chain
from vpipe.schedule.authors.gpipe import gpipe
from vpipe.schedule.authors.one_f_one_b import one_f_one_b
from vpipe.schedule.catalog import entries, get
from vpipe.schedule.program import Program, from_csv, to_csv

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
    assert shifting == [2]  # the program of the check of a config is the one that runs


def call(*words: str) -> int:
    """The exit code of a command, run in this process."""
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return int(end.value.code or 0)


PLUGIN = """
from vpipe.registry import SCHEDULE_REGISTRY
from vpipe.schedule.authors.authoring import Entry
from vpipe.schedule.authors.gpipe import gpipe
from vpipe.schedule.authors.one_f_one_b import one_f_one_b


def author(num_ranks, num_microbatches, *, early=True):
    return (one_f_one_b if early else gpipe)(num_ranks, num_microbatches)


SCHEDULE_REGISTRY.register("mine")(Entry("mine", author, "backwards early or late", bubble="(p-1)(F+I+W)"))
"""


def test_an_entry_of_a_plugin_file_has_its_option_in_configs_and_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file says everything: what an option is, its default, and what it does."""
    before = dict(SCHEDULE_REGISTRY._entries)
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    try:
        chosen = {"plugins": [str(file)], "parallel.scheduler": "mine", "parallel.schedule_options": {"early": False}}
        assert seen(chosen, tmp_path / "run") == gpipe(2, 4)
        config = tmp_path / "config.yaml"
        config.write_text(json.dumps(tiny({"training.max_iterations": 1})))
        more = ["--plugin", str(file), "--scheduler", "mine", "--output-dir", str(tmp_path / "told")]
        assert call("train", str(config), *more, "--set", "parallel.schedule_options={early: false}") == 0
        told = json.loads((tmp_path / "told" / "run.json").read_text())
        assert re.findall(r"\d[FB]\d", told["program"]) == re.findall(r"\d[FB]\d", to_csv(gpipe(2, 4)))
        for option, author in (("early=true", one_f_one_b), ("early=false", gpipe)):
            capsys.readouterr()
            assert (
                call("draw", "mine", "-p", "2", "-m", "4", "--plugin", str(file), "--format", "csv", "--option", option)
                == 0
            )
            assert from_csv(capsys.readouterr().out) == author(2, 4)
        assert call("draw", "mine", "-p", "2", "-m", "4", "--plugin", str(file), "--option", "late=true") == 2
        assert "mine has no option 'late'; its options are early" in capsys.readouterr().err
    finally:
        SCHEDULE_REGISTRY._entries.clear()
        SCHEDULE_REGISTRY._entries.update(before)


def test_an_option_reaches_its_schedule_by_any_of_its_names(tmp_path: Path) -> None:
    waves = {"parallel.scheduler": "hanayo", "model.num_layers": 8}
    expected = seen(waves | {"parallel.schedule_options": {"num_waves": 2}}, tmp_path / "a")
    assert seen(waves, tmp_path / "b") != expected
    for number, alias in enumerate(("wave", "Wave")):
        given = waves | {"parallel.scheduler": alias, "parallel.schedule_options": {"num_waves": 2}}
        assert seen(given, tmp_path / str(number)) == expected
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
            {"parallel.scheduler": "pipedream-2bw", "parallel.schedule_options": {"num_batches": 2}},
            "has num_batches, which a run chooses itself",
        ),
        (
            {"parallel.scheduler": "pipedream", "parallel.schedule_options": {"vertical_sync": "no"}},
            "vertical_sync must be true or false, not 'no'",
        ),
        (
            {"parallel.scheduler": "pipedream", "training.gradient_accumulation": 2},
            "counts units: give parallel.schedule_options: {update_interval: N} instead",
        ),
        (
            {
                "parallel.scheduler": "hanayo",
                "parallel.schedule_options": {"num_waves": 2},
                "parallel.stages_per_rank": 2,
            },
            "2 waves of hanayo are 4 stages per rank, not 2",
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
    assert get("async_threaded").runs_threads
    assert not get("gpipe").runs_threads
    assert {each.name for each in entries() if each.two_ways} == {"chimera", "dualpipe"}


def test_nobody_outside_asks_for_a_schedule_by_its_name_or_mode() -> None:
    """What a schedule is, its entry says. (The older keys of ``config.pipeline`` and the importer of VPipe's files know
    old words.)"""
    asking = re.compile(
        r"\.mode\s*[!=]=|\.mode\s+(not )?in \(|[!=]=\s*\"(async_threaded|pipedream|naive|hanayo)\"|\"num_batches\"\s+in"
    )
    found = [
        f"{path.relative_to(SOURCES)}: {line.strip()}"
        for path in sorted(SOURCES.rglob("*.py"))
        if path.relative_to(SOURCES).parts[0] != "schedule"
        and str(path.relative_to(SOURCES)) not in ("config/pipeline.py", "compat/vpipe_yaml.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if asking.search(line)
    ]
    assert not found
