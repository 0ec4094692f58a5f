"""``vpipe doctor --gpu`` on the emulated accelerator: sound as it is; a fault in each trial is found by that trial."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated_ranks import vendor_commands, vendor_python
from planted import FAULTS

from vpipe.cli import acceptance
from vpipe.cli.acceptance import TrialPlan, TrialResult, accept
from vpipe.cli.main import main
from vpipe.schedule import catalog

pytestmark = pytest.mark.slow
CAPACITY = 2.0**28
PLAN = TrialPlan("emu", 4, 64, 60.0)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    with vendor_python(tmp_path_factory.mktemp("vendor"), 4, capacity=CAPACITY) as found:
        yield found


def tried(
    only: str, python: tuple[Path, dict[str, str]], patches: pytest.MonkeyPatch, plan: TrialPlan = PLAN, **more: str
) -> list[TrialResult]:
    patches.setattr(sys, "executable", str(python[0]))
    for name, value in (python[1] | more).items():
        patches.setenv(name, value)
    found: list[TrialResult] = []
    accept(plan, 60, only, found.append)
    return found


NAMES = [trial["name"] for bout in PLAN.first() for trial in bout if "through main" not in trial["name"]]
MATRIX = [trial["name"] for bouts in PLAN.matrix() for bout in bouts for trial in bout]
CI = [*NAMES, "4 ranks, 1f1b, chain, through main memory", *MATRIX]


@pytest.mark.rotates(14)
@pytest.mark.parametrize("name", CI)
def test_every_trial_is_sound(name: str, python: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    found = [result for result in tried(name, python, monkeypatch) if result.name == name]
    assert [result.sound for result in found] == [True], found


def test_the_plan_has_all_that_is_promised() -> None:
    """Every schedule with every model on 2, 4 and 8 ranks, once; and no more processes than devices at a time."""
    plan = TrialPlan("emu", 8, 64, 60.0)
    names = [trial["name"] for bouts in plan.matrix() for bout in bouts for trial in bout]
    schedules = [entry.name for entry in catalog.entries()]
    wanted = {f"{p} ranks, {s}, {m}" for p in (2, 4, 8) for s in schedules for m in acceptance.MODELS}
    assert sorted(names) == sorted(wanted)
    assert all(sum(bout[0]["ranks"] for bout in bouts) <= 8 for bouts in plan.matrix())
    assert not any("8 ranks" in trial["name"] for bout in PLAN.first() for trial in bout)


PLANTED = [
    ("the ways between devices", "lost_way", "BROKEN"),
    ("products under posted receives", "waits_at_once", "HANGS"),
    ("4 ranks, 1f1b, chain, launches wait", "receives_before_work", "HANGS"),
    ("4 ranks, 1f1b, chain, one connection", "no_wait_for_messages", "DIFFERS"),
    ("4 ranks, 1f1b, chain, kernels loaded lazily", "receives_before_work", "HANGS"),
    ("4 ranks, 1f1b, chain, kernels loaded at once", "no_wait_for_messages", "DIFFERS"),
    ("4 ranks, 1f1b, chain, memory at 95 %", "leaks", "FAILS"),
    ("4 ranks, 1f1b, chain, 40 checkpoints, then a move", "forgets_what_moves", "DIFFERS"),
    ("a rank is killed in a step", "nothing_dies", "FAILS"),
    ("a device without memory", "no_limit", "FAILS"),
    ("a step and a peak, predicted", "wrong_rules", "FAR OFF"),
    ("4 ranks, 1f1b, chain, through main memory", "host_changes", "DIFFERS"),
    ("4 ranks, 1f1b, chain", "no_wait_for_messages", "DIFFERS"),
    ("4 ranks, zb-v, two tensors", "turned_messages", "DIFFERS"),
    ("4 ranks, gpipe, two-tensor skip", "turned_messages", "DIFFERS"),
    ("2 ranks, 1f1b, translation", "no_wait_for_messages", "DIFFERS"),
    ("4 ranks, 1f1b, tied", "ties_drift", "DIFFERS"),
    ("4 ranks, 1f1b, bfloat16", "other_precision", "DIFFERS"),
    ("4 ranks, 1f1b, dropout", "draws_anew", "DIFFERS"),
    ("4 ranks, 1f1b, swap", "swaps_early", "DIFFERS"),
]


@pytest.mark.rotates(5)
@pytest.mark.parametrize(("name", "fault", "verdict"), PLANTED, ids=[f"{p[1]}-{p[0]}" for p in PLANTED])
def test_a_planted_fault_is_found(
    name: str,
    fault: str,
    verdict: str,
    python: tuple[Path, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptance, "TRIALS", "planted")
    plan = PLAN._replace(limit=15.0) if verdict == "HANGS" else PLAN
    found = [r for r in tried(name, python, monkeypatch, plan, PLANTED=fault) if r.name == name]
    assert [(result.verdict, result.sound) for result in found] == [(verdict, False)], found


def test_every_fault_is_planted() -> None:
    assert set(FAULTS) == {fault for _, fault, _ in PLANTED}
    assert (
        not set(NAMES) - {name for name, *_ in PLANTED} - {ELASTIC} - {n for n in NAMES if "zb-v" in n or "dream" in n}
    )


ELASTIC = "an elastic run loses a rank"


def test_an_elastic_run_that_goes_on_wrongly_is_found(
    python: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A layer's random numbers depend on the process that computes it, and a new one takes the lost one's place."""
    (tmp_path / "fault.py").write_text(
        "import os, torch\nfrom vpipe.runtime import region\n"
        "region.seed_layer = lambda seed, unit, layer: torch.manual_seed(os.getpid() + unit * 31 + layer)\n"
    )
    monkeypatch.setattr(acceptance, "JOB", acceptance.JOB + f"plugins: ['{tmp_path / 'fault.py'}']\n")
    (found,) = tried(ELASTIC, python, monkeypatch)
    assert (found.verdict, found.sound) == ("FAILS", False), found


def test_the_report_is_json(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    with vendor_commands(tmp_path_factory.mktemp("doctor"), 2, capacity=CAPACITY) as vpipe:
        told = json.loads(vpipe(tmp_path, "doctor", "--gpu", "ways", "--json"))
        assert told["sound"]
        assert told["facts"]["number"] == 2
        assert [trial["verdict"] for trial in told["trials"]] == ["all work"]
        text = vpipe(tmp_path, "doctor", "--gpu", "0")
        assert "0 of 0 trials are sound" in text
        assert "left out for want of time" in text


@pytest.mark.parametrize(
    ("devices", "words"), [(0, "torch finds no accelerator"), (1, "this machine has 1 emu device")]
)
def test_what_is_missing_is_a_sentence(
    devices: int, words: str, python: tuple[Path, dict[str, str]], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in {**python[1], "EMULATED_DEVICES": str(devices)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--gpu"])
    assert end.value.code == 2
    assert words in "".join(capsys.readouterr())
    assert os.environ["EMULATED_DEVICES"] == str(devices)
