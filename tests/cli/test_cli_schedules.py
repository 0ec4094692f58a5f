"""draw, simulate, verify and schedules, as a user calls them: output, JSON keys, exit codes, one sentence per error."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_answer import Answer
from click.testing import CliRunner

from vpipe.cli.main import COMMANDS, cli, main
from vpipe.schedule.catalog import build
from vpipe.schedule.program import to_csv
from vpipe.schedule.verify import executable


@pytest.fixture
def vpipe_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """``main`` in this process: as quick as a function call."""
    monkeypatch.delenv("VPIPE_DEBUG", raising=False)

    def call(*args: str) -> Answer:
        with pytest.raises(SystemExit) as end:
            main(list(args))
        out, err = capsys.readouterr()
        return Answer(end.value.code or 0, out, err)  # type: ignore[arg-type]

    return call


def test_help_teaches(vpipe: Any) -> None:
    """That it is quick follows from what it does not import: tests/test_house.py."""
    done = vpipe("--help")
    assert done.returncode == 0
    assert "vpipe draw 1f1b -p 4 -m 8" in done.stdout


def test_every_command_that_help_lists_has_help() -> None:
    runner = CliRunner()
    listed = cli.list_commands(None)  # type: ignore[arg-type]
    assert {"schedules", "draw", "simulate", "verify"} <= set(listed) <= set(COMMANDS)
    for name in ("schedules", "draw", "simulate", "verify"):
        done = runner.invoke(cli, [name, "--help"])
        assert done.exit_code == 0
        assert f"vpipe {name}" in done.output, "help shows examples"


def test_simulate_json(vpipe_here: Any) -> None:
    found = vpipe_here("simulate", "1f1b", "-p", "4", "-m", "8", "--json").json()
    assert found == {
        "makespan": 33,
        "maxspan": 33,
        "ideal": 24,
        "bubble": 0.272727273,
        "utilisation": [0.727272727] * 4,
        "peak_activations": [4, 3, 2, 1],
        "weight_versions": [1, 1, 1, 1],
        "staleness": [0, 0, 0, 0],
    }


def test_simulate_takes_costs_and_options(vpipe_here: Any) -> None:
    slow = vpipe_here("simulate", "1f1b", "-p", "4", "-m", "16", "--latency", "1", "--json").json()
    assert slow["makespan"] == 85
    stale = vpipe_here("simulate", "pipedream", "-p", "4", "-m", "12", "--json").json()
    assert stale["staleness"] == [3, 2, 1, 0]
    assert stale["weight_versions"] == [4, 3, 2, 1]
    vertical = vpipe_here(
        "simulate", "pipedream", "-p", "4", "-m", "12", "--option", "vertical_sync=true", "--json"
    ).json()
    assert vertical["staleness"] == [3, 3, 3, 3]
    waves = vpipe_here("simulate", "hanayo", "-p", "4", "-m", "4", "--option", "num_waves=2", "--json").json()
    assert len(waves["weight_versions"]) == 16
    assert "makespan" in vpipe_here("simulate", "zb-auto", "-p", "4", "-m", "8", "--option", "memory_limit=3").out


def test_draw_csv_goes_round(vpipe_here: Any, tmp_path: Path) -> None:
    for more in ([], ["--lowered"]):
        path = tmp_path / "schedule.csv"
        done = vpipe_here("draw", "zb-v", "-p", "4", "-m", "8", "--format", "csv", *more, "-o", str(path))
        assert (done.code, done.out) == (0, "")
        assert vpipe_here("verify", str(path)).code == 0
        assert vpipe_here("simulate", str(path), "--json").json()["makespan"] == 25.5
    assert vpipe_here("draw", str(path), "--format", "csv").out == path.read_text()


def test_draw_lowered_is_what_ranks_run(vpipe_here: Any) -> None:
    """With the agreement of a synchronous schedule, and without one where stages update one by one."""
    for name, agrees in (("zb-v", True), ("chimera", True), ("pipedream", False)):
        drawn = vpipe_here("draw", name, "-p", "4", "-m", "8", "--format", "csv", "--lowered").out
        assert drawn == to_csv(executable(build(name, 4, 8), name, agrees=agrees))
        assert ("AGREE" in drawn) is agrees


def test_draw_without_a_terminal_is_plain(vpipe: Any) -> None:
    done = vpipe("draw", "1f1b", "-p", "2", "-m", "2")
    assert "rank 0  F0 F1" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_draw_on_a_terminal_has_colour(environment: dict[str, str], coloured: bool) -> None:
    ours, theirs = pty.openpty()
    known = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    command = [sys.executable, "-m", "vpipe", "draw", "1f1b", "-p", "2", "-m", "2"]
    subprocess.run(command, stdout=theirs, env=known | environment, check=True, timeout=200)
    os.close(theirs)
    assert (b"\x1b[" in os.read(ours, 65536)) is coloured


def test_draw_svg(vpipe_here: Any) -> None:
    assert vpipe_here("draw", "1f1b", "-p", "4", "-m", "8", "--format", "svg").out.startswith("<svg ")


def test_verify_says_valid(vpipe_here: Any) -> None:
    done = vpipe_here("verify", "1f1b", "-p", "4", "-m", "8")
    assert (done.code, done.out) == (
        0,
        "1f1b: valid (4 ranks, 4 stages, 8 microbatches, 68 actions)\n",
    )
    assert vpipe_here("verify", "1f1b", "-p", "4", "-m", "8", "--json").json() == {
        "valid": True,
        "violations": [],
    }


def test_verify_prints_the_grid_and_all_violations(vpipe_here: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0F0,,0F1,0B0,0B0,0B1\n1F0,1B0,1B1\n")
    done = vpipe_here("verify", str(path))
    assert done.code == 1
    assert ">0B0<" in done.out
    assert "row 1, column 5: 0B0: runs twice" in done.out
    assert "row 2: the forward of microbatch 1 at stage 1 (1F1) is missing" in done.out
    found = vpipe_here("verify", str(path), "--json")
    assert found.code == 1
    assert {tuple(each) for each in found.json()["violations"]} == {("rank", "index", "action", "reason")}


def test_verify_sees_a_deadlock(vpipe_here: Any, tmp_path: Path) -> None:
    path = tmp_path / "crossed.csv"
    path.write_text(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    done = vpipe_here("verify", str(path))
    assert done.code == 1
    assert "deadlock: waits for ever" in done.out


def test_verify_a_memory_bound(vpipe_here: Any) -> None:
    assert vpipe_here("verify", "zb-h2", "-p", "4", "-m", "8", "--max-activations", "4").code == 1
    assert vpipe_here("verify", "zb-h2", "-p", "4", "-m", "8", "--max-activations", "7").code == 0


def test_a_file_on_standard_input(vpipe: Any) -> None:
    assert vpipe("verify", "-", stdin="0F0,0B0\n1F0,1B0\n").returncode == 0


def test_schedules_lists_the_catalogue(vpipe_here: Any) -> None:
    rows = vpipe_here("schedules", "--json").json()
    assert {"gpipe", "1f1b", "zb-v", "pipedream-2bw"} <= {row["name"] for row in rows}
    assert {"name", "needs", "bubble", "memory"} <= set(rows[0])
    assert "(p-1)T" in vpipe_here("schedules").out


def test_schedules_rank(vpipe_here: Any) -> None:
    rows = vpipe_here("schedules", "--rank", "-p", "4", "-m", "16", "--latency", "1", "--memory", "8", "--json").json()
    times = {row["name"]: row["makespan"] for row in rows if not row["refused"]}
    assert times["1f1b"] == 85
    assert times["interleaved v=4"] == 114.75
    fits = [row["fits"] for row in rows if not row["refused"]]
    assert fits == sorted(fits, reverse=True)
    table = vpipe_here("schedules", "--rank", "-p", "4", "-m", "16", "--memory", "8").out
    assert "over the memory of 8" in table
    assert "steady state" in table


BAD = [
    (["drow"], 2, "there is no command 'drow'; did you mean 'draw'?"),
    (["simulate", "1f2b", "-p", "4", "-m", "8"], 2, "there is no schedule '1f2b'; did you mean '1f1b'?"),
    (["simulate", "1f1b", "-p", "4"], 2, "1f1b needs the number of microbatches: add -m N"),
    (["simulate", "1f1b", "-p", "0", "-m", "8"], 2, "0 is not in the range x>=1"),
    (["simulate", "1f1b", "-p", "x", "-m", "8"], 2, "'x' is not a valid integer"),
    (["simulate", "1f1b", "-p", "4", "-m", "8", "-v", "3"], 2, "1f1b has 1 stage per rank, not 3"),
    (["simulate", "hanayo", "-p", "4", "-m", "8", "-v", "3"], 2, "hanayo"),
    (["simulate", "pipedream-2bw", "-p", "8", "-m", "2"], 2, "at least 7 microbatches"),
    (["simulate", "1f1b", "-p", "4", "-m", "8", "--option", "num_waves=2"], 2, "1f1b has no option 'num_waves'"),
    (
        ["simulate", "pipedream", "-p", "3", "-m", "8", "--option", "replicas=2,2"],
        2,
        "add up to 4 ranks, but there are 3",
    ),
    (["simulate", "pipedream", "-p", "3", "-m", "8", "--option", "replicas=2,x"], 2, "not '2,x'"),
    (
        ["simulate", "1f1b", "-p", "4", "-m", "8", "--forward", "-1"],
        2,
        "--forward is -1.0, but a time is a finite number",
    ),
    (["submit", "job.yaml", "--to", "ray", "--with", "gpus=2"], 2, "--with gpus=2 says nothing to ray"),
    (["submit", "job.yaml", "--with", "ntasks_per_node=x"], 2, "ntasks_per_node is 'x', but it is a whole number"),
    (["submit", "job.yaml", "--with", "requeue=no"], 2, "requeue is 'no', but it is true or false"),
    (["simulate", "1f1b", "-p", "4", "-m", "8", "--latency", "nan"], 2, "--latency is nan"),
    (
        ["simulate", "1f1b", "-p", "4", "-m", "8", "--scale", "1,2"],
        2,
        "--scale has 2 factors, but the program has 4 stages",
    ),
    (["simulate", "1f1b", "-p", "1000000", "-m", "1000000"], 2, "at most 4000000 are simulated"),
    (
        ["simulate", "1f1b", "--json", "--option", "versions=newest", "-p", "2", "-m", "2"],
        2,
        "has no option 'versions'",
    ),
    (["draw", "1f1b", "-p", "2", "-m", "2", "--lowered"], 2, "--lowered is for --format csv"),
    (["draw", "1f1b", "-p", "2", "-m", "2", "-o", "/no/such/folder/x.txt"], 2, "cannot be written"),
    (["draw", "1f1b", "-p", "2", "-m", "2", "--format", "jpg"], 2, "'jpg' is not one of"),
    (["draw", "1f1b", "--colour"], 2, "No such option '--colour'"),
    (["verify", "missing.csv"], 2, "missing.csv does not exist; 'vpipe draw 1f1b -p 4 -m 8 -o missing.csv' writes one"),
    (["schedules", "--rank", "-p", "4"], 2, "add -p N -m N"),
    (["schedules", "--rank", "-p", "256", "-m", "1024"], 2, "at most 400000 are ranked"),
    (["schedules", "--latency", "1"], 2, "--latency is for the ranking: add --rank"),
]


@pytest.mark.parametrize(
    ("args", "code", "sentence"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else None
)
def test_bad_input_is_one_sentence(args: list[str], code: int, sentence: str, vpipe_here: Any) -> None:
    done = vpipe_here(*args)
    assert done.code == code
    assert done.out == ""
    assert sentence in done.err
    assert done.err.startswith("vpipe: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "code", "sentence"),
    [
        (b"", 2, "bad.csv holds no action"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", 2, "bad.csv is not text"),
        (b"0F0,0Q0\n", 2, "bad.csv, row 1, column 2: '0Q0' is not an action"),
        (b"0F0,0B0\n2F0,2B0\n", 2, "stage 1 is on no rank, though stage 2 is; is a row missing?"),
        (b"0F0,0B0\n1F0,1B0,1B0\n", 1, "bad.csv, row 2, column 3: 1B0: runs twice, first as action 1"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "draw"])
def test_bad_files(command: str, content: bytes, code: int, sentence: str, vpipe_here: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_bytes(content)
    done = vpipe_here(command, str(tmp_path / "bad.csv"))
    assert (done.code, done.out, done.err.count("\n")) == (code, "", 1)
    assert sentence in done.err


def test_a_file_has_its_own_numbers(vpipe_here: Any, tmp_path: Path) -> None:
    (tmp_path / "two.csv").write_text("0F0,0B0\n1F0,1B0\n")
    assert "has 2 ranks, but -p says 4" in vpipe_here("simulate", str(tmp_path / "two.csv"), "-p", "4").err
    assert (
        "is a file, which says all itself"
        in vpipe_here("verify", str(tmp_path / "two.csv"), "--option", "num_waves=2").err
    )


def test_debug_shows_the_traceback(vpipe: Any) -> None:
    done = vpipe("simulate", "1f2b", "-p", "4", "-m", "8", VPIPE_DEBUG="1")
    assert "Traceback" in done.stderr
    assert "Traceback" not in vpipe("simulate", "1f2b", "-p", "4", "-m", "8").stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m vpipe draw gpipe -p 64 -m 64 | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200, check=False)
    assert done.stderr == ""
