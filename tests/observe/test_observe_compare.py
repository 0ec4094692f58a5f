"""A fair sweep: order, resumption, failures as rows, equality of losses, a CSV that is safe to open."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from observe_runs import Vpipe, write_run

from programs import needs
from vpipe.errors import UserError
from vpipe.observe import comparison, sweep
from vpipe.observe.sweep import Case, Sweep


class FakeTrain:
    """Writes run directories instead of training; ``broken`` schedules fail, ``wrong`` ones compute something else."""

    def __init__(self, broken: Sequence[str] = (), wrong: Sequence[str] = (), stop_after: int = 10**9) -> None:
        self.order: list[str] = []
        self.broken, self.wrong, self.stop_after = broken, wrong, stop_after

    def __call__(self, command: Sequence[str], log: Path, timeout: float) -> int:
        if len(self.order) >= self.stop_after:
            raise KeyboardInterrupt
        schedule = command[command.index("--scheduler") + 1]
        directory = Path(command[command.index("--output-dir") + 1])
        microbatches = int(next(w for w in command if w.startswith("training.num_microbatches=")).split("=")[1])
        self.order.append(directory.name)
        if schedule in self.broken:
            log.write_text("Traceback …\nvpipe: zb-h1 needs more microbatches\nbye\n")
            return 2
        log.write_text("done\n")
        write_run(directory, schedule, 2, microbatches, steps=2, seed=1 if schedule in self.wrong else 0, name="=1+1")
        return 0


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("model: {name: gpt}\ndataset: {name: synthetic}\n")
    return path


def test_repeats_are_interleaved(config: Path) -> None:
    cases = Sweep(config, ("gpipe", "1f1b"), (4, 8), ("a/b", "c"), repeats=2).cases()
    names = [case.name for case in cases]
    assert names[:4] == ["a-b-gpipe-m4-r0", "a-b-1f1b-m4-r0", "a-b-gpipe-m8-r0", "a-b-1f1b-m8-r0"]
    assert [name[-2:] for name in names] == ["r0"] * 8 + ["r1"] * 8
    assert len(set(names)) == 16


def test_every_run_is_the_same_command_but_for_what_is_compared(config: Path) -> None:
    wanted = Sweep(config, ("gpipe", "1f1b"), (4,), overrides=("training.max_iterations=7", "training.seed=3"))
    first, second = (wanted.command(case, Path("D")) for case in wanted.cases())
    assert [word for word in first if word not in second] == ["gpipe"]
    assert first[first.index("--scheduler") - 2 : first.index("--scheduler")] == ["train", str(config)]
    for setting in ("training.max_iterations=7", "training.seed=3", "checkpoint.interval=-1"):
        assert first[first.index(setting) - 1] == "--set"


def test_a_sweep_goes_on_where_it_stopped(config: Path, tmp_path: Path) -> None:
    wanted, output, lines = Sweep(config, ("gpipe", "1f1b", "zb-h1"), (4,), repeats=2), tmp_path / "out", list[str]()
    with pytest.raises(KeyboardInterrupt):
        sweep.run(wanted, output, lines.append, FakeTrain(stop_after=4))
    later = FakeTrain()
    results = sweep.run(wanted, output, lines.append, later)
    assert later.order == ["1f1b-m4-r1", "zb-h1-m4-r1"]
    assert [result["status"] for result in results] == ["done"] * 6
    assert sum("from before" in line for line in lines) == 4
    more = FakeTrain()
    sweep.run(Sweep(config, ("gpipe", "pipedream"), (4,), repeats=2), output, lines.append, more)
    assert more.order == ["pipedream-m4-r0", "pipedream-m4-r1"]


def test_another_experiment_needs_another_directory(config: Path, tmp_path: Path) -> None:
    sweep.run(Sweep(config, ("gpipe",), (4,)), tmp_path / "out", str, FakeTrain())
    with pytest.raises(UserError, match="choose another directory"):
        sweep.run(
            Sweep(config, ("gpipe",), (4,), overrides=("training.max_iterations=3",)),
            tmp_path / "out",
            str,
            FakeTrain(),
        )
    config.write_text("model: {name: bert}\n")
    with pytest.raises(UserError, match="choose another directory"):
        sweep.run(Sweep(config, ("gpipe",), (4,)), tmp_path / "out", str, FakeTrain())


def test_a_failed_run_is_a_row_with_its_reason(config: Path, tmp_path: Path) -> None:
    wanted, output = Sweep(config, ("gpipe", "zb-h1"), (4,)), tmp_path / "out"
    results = sweep.run(wanted, output, str, FakeTrain(broken=["zb-h1"]))
    table, page = comparison.write(output, results, {})
    rows = list(csv.DictReader(table.open()))
    assert [row["status"] for row in rows] == ["done", "failed"]
    assert rows[1]["reason"] == "zb-h1 needs more microbatches (exit code 2)"
    assert "needs more microbatches" in page.read_text()
    again = FakeTrain()
    sweep.run(wanted, output, str, again)
    assert again.order == []
    sweep.run(wanted, output, str, again, retry=True)
    assert again.order == ["zb-h1-m4-r0"]


def test_a_run_that_ends_without_a_summary_has_failed(config: Path, tmp_path: Path) -> None:
    def train(command: Sequence[str], log: Path, timeout: float) -> int:
        FakeTrain()(command, log, timeout)
        (Path(command[-1]) / "summary.json").unlink()
        return 0

    (result,) = sweep.run(Sweep(config, ("gpipe",), (4,)), tmp_path / "out", str, train)
    assert result["status"] == "failed"
    assert "summary.json" in result["reason"]


def test_losses_of_synchronous_schedules_must_be_equal(config: Path, tmp_path: Path) -> None:
    wanted = Sweep(config, ("gpipe", "1f1b", "zb-h1", "pipedream"), (4,))
    results = sweep.run(wanted, tmp_path / "out", str, FakeTrain(wrong=["zb-h1", "pipedream"]))
    said = comparison.equality(results)
    assert said["gpipe-m4-r0"] == "reference"
    assert said["1f1b-m4-r0"] == "equal"
    assert said["zb-h1-m4-r0"].startswith("differs from gpipe-m4-r0 at iteration 1: ")
    assert "pipedream-m4-r0" not in said
    grouped = {group["schedule"]: group for group in comparison.groups(results)}
    assert grouped["1f1b"]["equal"] == "equal"
    assert grouped["pipedream"]["equal"] is None
    assert max(grouped["pipedream"]["staleness"]) == 1


def test_what_spoils_a_comparison_is_said(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = sweep.run(Sweep(config, ("gpipe", "1f1b"), (4,), repeats=2), tmp_path / "out", str, FakeTrain())
    assert comparison.caveats(results, comparison.groups(results)) == []
    results[0] |= {"throughput_tokens_per_second": 1000.0, "code": "another", "updates": 999}
    results[2] |= {"updates": 999}
    said = " ".join(comparison.caveats(results, comparison.groups(results)))
    for part in ("code changed", "Repeats of gpipe differ", "different numbers of updates"):
        assert part in said
    monkeypatch.setattr(sweep, "code", lambda: "changed")
    with pytest.raises(UserError, match="choose another directory"):
        sweep.run(Sweep(config, ("gpipe",), (4,)), tmp_path / "out", str, FakeTrain())


def test_the_reason_of_an_exception_names_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback\nValueError: no\nvpipe: this happened at rank 0, action 0F0\nrank 1: ended\n")
    assert sweep._reason(log, 1) == "ValueError: no: this happened at rank 0, action 0F0 (exit code 1)"
    assert sweep._reason(tmp_path / "none", 3) == "it said nothing (exit code 3)"


def test_the_csv_cannot_become_a_formula(config: Path, tmp_path: Path) -> None:
    results = sweep.run(Sweep(config, ("gpipe",), (4,)), tmp_path / "out", str, FakeTrain())
    (row,) = csv.DictReader(comparison.to_csv(results).splitlines())
    assert row["model"] == "'=1+1"
    assert float(row["throughput_tokens_per_second"]) == 81000.0
    assert 0 < float(row["bubble"]) < 1
    stored = json.loads((tmp_path / "out" / "runs" / "gpipe-m4-r0.json").read_text())
    assert len(stored["losses"]) == 20
    assert stored["executed_verifies"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nowhere.yaml", "--schedulers", "gpipe", "--microbatches", "4"], "does not exist"),
        (["CONFIG", "--schedulers", "gpip", "--microbatches", "4"], "did you mean 'gpipe'"),
        (["CONFIG", "--schedulers", "gpipe,gpipe", "--microbatches", "4"], "named twice"),
        (["CONFIG", "--schedulers", "gpipe", "--microbatches", "four"], "whole numbers"),
    ],
)
def test_bad_questions_are_one_sentence(vpipe: Vpipe, config: Path, tmp_path: Path, args: list[str], says: str) -> None:
    words = [str(config) if word == "CONFIG" else word for word in args]
    done = vpipe("compare", *words, "-o", str(tmp_path / "out"))
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_microbatches_are_the_configs_unless_given(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As README prints it."""
    from click.testing import CliRunner

    from vpipe.cli.compare import command

    asked: list[Sweep] = []

    def stop(wanted: Sweep, *rest: object, **more: object) -> list[object]:
        asked.append(wanted)
        raise UserError("enough")

    monkeypatch.setattr(sweep, "run", stop)
    args = [str(config), "--schedulers", "1f1b", "--set", "training.num_microbatches=2", "-o", str(tmp_path / "out")]
    CliRunner().invoke(command, args)
    assert [each.microbatches for each in asked] == [(2,)]


def test_names_of_cases_are_names_of_files() -> None:
    assert Case("1f1b", 4, 0, "../../x y").name == "..-..-x-y-1f1b-m4-r0"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_sweep(vpipe: Vpipe, tmp_path: Path) -> None:
    """Two schedules train for real, and agree to the bit."""
    config = Path(__file__).parents[2] / "configs" / "gpt_small_cpu.yaml"
    args = [
        "compare",
        str(config),
        "--schedulers",
        "gpipe,zb-h1",
        "--microbatches",
        "4",
        "--set",
        "training.max_iterations=4",
    ]
    done = vpipe(*args, "--set", "parallel.model_parallel_size=2", "-o", str(tmp_path / "out"), timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(csv.DictReader((tmp_path / "out" / "results.csv").open()))
    assert [row["losses_equal"] for row in rows] == ["reference", "equal"]


@needs("chromium")
def test_the_page_of_a_comparison(config: Path, tmp_path: Path) -> None:
    browser_api: Any = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
    results = sweep.run(
        Sweep(config, ("gpipe", "1f1b", "zb-h1", "pipedream"), (4, 8), repeats=2),
        tmp_path / "out",
        str,
        FakeTrain(broken=["zb-h1"]),
    )
    _, report = comparison.write(tmp_path / "out", results, {"title": "<b>sweep</b>"})
    with browser_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
        page.goto(report.as_uri())
        page.wait_for_selector("#results table")
        assert page.inner_text("h1") == "<b>sweep</b>"
        assert page.locator("#results tbody tr").count() == 8
        assert "same losses to the bit" in page.inner_text("#verdict")
        assert "needs more microbatches" in page.inner_text("#results")
        assert "staleness" in page.inner_text("#results")
        assert not problems
        browser.close()
