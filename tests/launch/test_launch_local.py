"""``vpipe run``: one output, every ending clean, nothing to be heard from outside the machine."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import FAILING, HANG, Running, vpipe_run

import forked_python
from vpipe.errors import UserError
from vpipe.launch import local
from vpipe.launch.output import Output, Sink
from vpipe.launch.stopping import Grace
from vpipe.rundir.journal import Ending

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)
Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``vpipe run``, forked or ``fresh``; whatever the test leaves is killed."""
    runs: list[Running] = []

    def begin(num_ranks: int, *target: str, fresh: bool = False, options: tuple[str, ...] = ()) -> Running:
        python = sys.executable if fresh else None
        runs.append(vpipe_run(tmp_path, num_ranks, *target, options=options, python=python))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill_all()


def test_of_what_runs_at_once_each_sees_its_own(tmp_path: Path) -> None:
    """Negative control of all that looks for what a command has left behind."""
    forks = "import os, time; os.fork(); os.write(1, b'forked\\n'); time.sleep(600)"
    runs = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        runs.append(Running(tmp_path / name, forked_python.program(), "-c", forks))
    try:
        for run in runs:
            run.until("forked\nforked")
        seen = [{process.pid for process in run.processes()} for run in runs]
        assert [len(pids) for pids in seen] == [3, 3], "the program, the fork and its own"
        assert not seen[0] & seen[1]
    finally:
        for run in runs:
            run.kill_all()


@pytest.mark.slow
def test_the_example_prints_the_same_losses_on_four_ranks_and_in_one_process(start: Start) -> None:
    script = str(ROOT / "examples" / "minimal.py")
    four = start(4, script, fresh=True)
    assert four.wait() == 0, four.err
    one = subprocess.run([forked_python.program(), script], capture_output=True, text=True, timeout=HANG, check=True)
    assert four.out == one.stdout
    assert four.out.count("loss") == 5
    four.assert_clean()


@pytest.mark.slow
def test_only_loopback_is_listened_on_and_every_rank_knows_its_place(start: Start, tmp_path: Path) -> None:
    run = start(3, FAILING, "long", "0", options=("--log-dir", str(tmp_path / "logs")))
    run.until("step 1")
    listening = [c.laddr.ip for p in run.processes() for c in p.net_connections() if c.status == "LISTEN"]
    assert len(listening) >= 4  # the store, and gloo in each rank
    assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "Traceback" not in run.err
    run.assert_clean()
    assert "step 1" in (tmp_path / "logs" / "rank0.log").read_text()
    assert (tmp_path / "logs" / "rank2.log").exists()


@pytest.mark.slow
def test_second_interrupt_ends_at_once_what_the_first_could_not(start: Start) -> None:
    run = start(2, FAILING, "stubborn", "0", options=("--grace", "300"))
    run.until("step 1")
    run.process.send_signal(signal.SIGINT)
    run.until("Ctrl-C again")
    time.sleep(1.0)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    run.assert_clean()


@pytest.mark.slow
def test_terminate_stops_in_good_order(start: Start) -> None:
    run = start(2, FAILING, "long", "0")
    run.until("step 1")
    run.process.terminate()
    assert run.wait() == 143
    run.assert_clean()


def test_a_killed_launcher_leaves_nothing(start: Start) -> None:
    run = start(2, FAILING, "long", "0", fresh=True)
    run.until("step 1")
    assert len(run.processes()) == 5  # launcher, zygote, store, two ranks
    run.process.kill()
    run.assert_clean()


@pytest.mark.slow
def test_a_launcher_killed_while_torch_is_imported_leaves_nothing(start: Start) -> None:
    run = start(2, FAILING, "long", "0", fresh=True)
    while len(run.processes()) < 2:
        time.sleep(0.01)
    run.process.kill()
    run.assert_clean()


@pytest.mark.slow
def test_a_killed_zygote_takes_the_ranks_along(start: Start) -> None:
    run = start(2, FAILING, "long", "0", fresh=True)
    run.until("step 1")
    zygote = next(p for p in run.processes() if p.ppid() == run.process.pid)
    zygote.kill()
    assert run.wait() == 1
    run.assert_clean()


MEETS_AGAIN = """
import os, sys
from datetime import timedelta
import psutil
import torch.distributed as dist

def store():
    return dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False, timedelta(seconds=60), wait_for_workers=False)

store().set("before", "1")
me = psutil.Process()
keeper, = (each for each in me.parent().children() if each.pid != me.pid)
keeper.send_signal(int(sys.argv[1]))
if sys.argv[1] == "9":
    psutil.wait_procs([keeper])
store().set("after", "2")
print("met again", store().get("after").decode())
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_ranks_can_meet_again_when_the_store_s_process_was_lost(
    signum: signal.Signals, start: Start, tmp_path: Path
) -> None:
    """An elastic run hung at its next loss."""
    (tmp_path / "meets.py").write_text(MEETS_AGAIN)
    run = start(1, str(tmp_path / "meets.py"), str(int(signum)))
    assert run.wait() == 0, run.err
    assert run.out == "met again 2\n"
    run.assert_clean()


SPEAKERS = """
import os, sys
rank = int(os.environ["RANK"])
print(f"hello {os.environ['WORLD_SIZE']} {sys.argv[1:]} {os.environ['OMP_NUM_THREADS']}")
print("warned", file=sys.stderr)
if rank == 0:
    for part in range(3):
        print(f"\\r{part}/2", end="", flush=True)
    print()
"""


def test_lines_of_other_ranks_are_tagged(tmp_path: Path) -> None:
    (tmp_path / "speakers.py").write_text(SPEAKERS)
    out, err = io.BytesIO(), io.BytesIO()
    code = local.run(
        [str(tmp_path / "speakers.py"), "--x", "1"], 2, preload=["json"], threads=1, stdout=out, stderr=err
    )
    # without torch there is no store; these ranks do not meet
    assert code == 0, err.getvalue()
    lines = out.getvalue().decode().split("\n")
    assert "hello 2 ['--x', '1'] 1" in lines
    assert "[rank 1] hello 2 ['--x', '1'] 1" in lines
    assert "\r0/2\r1/2\r2/2" in lines
    assert sorted(err.getvalue().decode().splitlines())[-2:] == ["[rank 1] warned", "warned"]


def test_progress_bars_survive_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "speakers.py").write_text(SPEAKERS + "print(sys.stdout.isatty())")
    ours, theirs = pty.openpty()
    seen = b""

    def read() -> None:
        nonlocal seen
        while b"end of test" not in seen:
            seen += os.read(ours, 4096)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "wb", buffering=0) as terminal:
        assert (
            local.run([str(tmp_path / "speakers.py")], 2, preload=["json"], stdout=terminal, stderr=io.BytesIO()) == 0
        )
        terminal.write(b"end of test")
        reader.join(200)
    os.close(ours)
    assert b"\r0/2\r1/2\r2/2\r\n" in seen.replace(b"\r\r\n", b"\r\n")
    assert b"\r\nTrue\r\n" in seen
    assert b"[rank 1] False" in seen


def test_a_line_of_another_rank_goes_above_the_progress_bar() -> None:
    stream = io.BytesIO()
    sink = Sink(stream, is_terminal=True)
    sink.write(0, b"a\n\r50%")
    sink.write(2, b"tor")
    sink.write(2, b"n\r\rlate\nrest")
    sink.write(0, b"\r60%")
    sink.finish()
    assert stream.getvalue() == b"a\n\r50%\r\x1b[K[rank 2] late\n\r50%\r60%\r\x1b[K[rank 2] rest\n\r50%\r60%\n"


def test_quiet_output_still_logs(tmp_path: Path) -> None:
    out = io.BytesIO()
    output = Output(out, out, 1, tmp_path / "logs", quiet=True)
    output.feed(0, 0, b"hidden\n")
    output.say("shown")
    output.finish()
    output.close()
    assert out.getvalue() == b"shown\n"
    assert (tmp_path / "logs" / "rank0.log").read_bytes() == b"hidden\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_logs_and_redirected_words_but_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").symlink_to("/dev/full")
    err = io.BytesIO()
    with Path("/dev/full").open("wb", buffering=0) as full:
        output = Output(full, err, 1, tmp_path, quiet=False)
        output.feed(0, 0, b"one\n")
        output.feed(0, 0, b"three\n")
        output.finish()
        output.close()
    first, last = err.getvalue().decode().splitlines()
    assert first == f"vpipe: warning: {tmp_path}/rank0.log: No space left on device; the run goes on without it"
    assert last == "vpipe: warning: 10 bytes of the ranks' log files could not be written"


def test_functions_get_their_arguments_and_return_exit_codes() -> None:
    err = io.BytesIO()
    code = local.run("os:_exit", 2, arguments={"status": 7}, preload=["json"], stderr=err)
    assert code == 7
    assert b"exit code 7" in err.getvalue()


@pytest.mark.parametrize(
    ("target", "num_ranks", "words"),
    [([], 2, "no script"), (["nowhere.py"], 2, "no file 'nowhere.py'"), (["x.py"], 0, "at least 1")],
)
def test_mistakes_are_sentences(target: list[str], num_ranks: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        local.run(target, num_ranks)


def test_more_ranks_than_files_may_be_open_are_refused(tmp_path: Path) -> None:
    """A soft limit is raised; one that is hard was 45 lines of traceback."""
    script = "from vpipe.launch import local; raise SystemExit(local.run('os:_exit', 16, arguments={'status': 0}))"
    found = {}
    for limit in ("-n 64", "-Sn 64"):
        command = f'ulimit {limit}; exec "$0" -c "$1"'
        done = subprocess.run(["bash", "-c", command, sys.executable, script], capture_output=True, text=True)
        found[limit] = (done.returncode, done.stderr)
    assert "16 ranks need up to 160 open files in a process, but no more than 64" in found["-n 64"][1]
    assert found["-Sn 64"] == (0, "")
    config = Path(__file__).parents[2] / "configs" / "gpt_1f1b_cpu.yaml"
    train = f"ulimit -n 64; exec $0 -m vpipe train {config} --set parallel.model_parallel_size=16 --output-dir run"
    words = ["bash", "-c", f"{train} --set model.num_layers=16", sys.executable]
    assert subprocess.run(words, cwd=tmp_path, stderr=subprocess.DEVNULL, check=False).returncode == 2
    assert "16 ranks need up to 160" in (tmp_path / "run" / "summary.json").read_text(), "its state is told"


def test_a_module_that_cannot_be_imported_is_named() -> None:
    err = io.BytesIO()
    assert local.run("os:getpid", 1, preload=["no_such_module"], stderr=err) == 1
    assert b"no_such_module cannot be imported" in err.getvalue()


@pytest.mark.slow
def test_what_the_zygote_froze_is_freed_when_a_rank_ends(start: Start, tmp_path: Path) -> None:
    """Else triton of a CUDA build tells of 513 leaked functions behind every run."""
    (tmp_path / "cycle.py").write_text(
        "import gc\n"
        "class Cycle:\n"
        "    def __init__(self): self.me = self\n"
        "    def __del__(self, write=__import__('os').write): write(1, b'freed\\n')\n"
        "gc.disable(); Cycle(); gc.freeze()\n"
    )
    run = start(1, str(tmp_path / "cycle.py"), fresh=True)
    assert run.wait() == 0, run.err
    assert "freed" in run.out


OWN = """
import os, signal, sys
from pathlib import Path

HERE = Path(__file__).parent
left_open = (HERE / "left_open.txt").open("w")


class Torn:
    def __del__(self, write=(HERE / "torn.txt").write_text):
        write("torn")


torn = Torn()


def work():
    left_open.write("kept")
    print("done", end="")


def save_slowly():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print("begins")
    signal.sigwait([signal.SIGTERM])
    os.read(os.open(HERE / "disk", os.O_RDONLY), 1)
    return 75
"""


def test_a_rank_of_ours_leaves_at_once_and_loses_nothing(tmp_path: Path) -> None:
    """Its interpreter, taking itself apart, took longer than a run may take that was asked to stop (a load of 15)."""
    (tmp_path / "own.py").write_text(OWN)
    out = io.BytesIO()
    found = {"PYTHONPATH": str(tmp_path)}
    assert local.run("own:work", 1, preload=["json"], environment=found, stdout=out, stderr=io.BytesIO()) == 0
    assert out.getvalue().strip() == b"done"
    assert (tmp_path / "left_open.txt").read_text() == "kept"
    assert not (tmp_path / "torn.txt").exists()


class Asks(io.BytesIO):
    """Asks for the end of the run when a rank has begun."""

    def write(self, data: Any, /) -> int:
        if b"begins" in bytes(data):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(data)


def test_ranks_that_save_are_waited_for_beyond_the_grace(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    os.mkfifo(tmp_path / "disk")
    asked: list[int] = []

    def more() -> float:
        asked.append(1)
        if len(asked) == 3:  # now the disk has taken it
            threading.Thread(target=(tmp_path / "disk").write_text, args=("x",)).start()
        return 0.01 if len(asked) < 3 else 100.0

    found, said = {"PYTHONPATH": str(tmp_path)}, io.BytesIO()
    grace = Grace(lambda: 0.01, more)
    code = local.run("own:save_slowly", 1, preload=["json"], environment=found, stdout=Asks(), stderr=said, grace=grace)
    assert (code, len(asked)) == (75, 3), said.getvalue()
    assert said.getvalue().count(b"still saving, and are waited for") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_request_before_the_ranks_begin_is_no_traceback(tmp_path: Path, number: int, code: int) -> None:
    """While the run was still being checked, the socket to the zygote broke in the launcher's hands."""
    (tmp_path / "own.py").write_text(
        f"import os, signal\ndef ask(): os.kill({os.getpid()}, {int(number)}); signal.pause()\n"
    )
    said = io.BytesIO()
    told: list[Ending] = []

    def concluded(ending: Ending) -> str:
        told.append(ending)
        return ""

    ended = local.run(
        "own:work",
        2,
        preload=["json"],
        environment={"PYTHONPATH": str(tmp_path)},
        stderr=said,
        check={"function": "own:ask", "arguments": {}},
        concluded=concluded,
    )
    assert ended == code, said.getvalue()
    assert "before the ranks began" in told[0].sentence
    assert told[0].code == code


@pytest.mark.parametrize(("words", "runs"), [(["../mine.py"], ""), (["-m", "mine"], "mine")], ids=["script", "module"])
def test_modules_of_the_current_directory_run_only_where_the_user_says_m(
    words: list[str], runs: str, tmp_path: Path
) -> None:
    """What lies there may have the name of any module: the zygote of a run took torch.py for torch."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("vpipe", "torch", "typing", "json", "yaml", "socket"):
        (here / f"{name}.py").write_text(f"open('ran', 'a').write('{name} ')\n")
    (tmp_path / "mine.py").write_text("print('mine runs')\n")
    if runs:
        (tmp_path / "mine.py").rename(here / "mine.py")
        for each in here.glob("[!m]*.py"):
            each.unlink()
    program = [sys.executable, "-Pc", "from vpipe.cli.main import main; main()", "run", "--nproc", "1"]
    done = subprocess.run([*program, *words], cwd=here, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "mine runs\n"
    assert not (here / "ran").exists()


def test_every_process_of_ours_is_started_so() -> None:
    named = [
        path
        for path in (ROOT / "src").rglob("*.py")
        if re.search(r'executable, "-m"|PYTHON, "-m"|"-m", (module|"vpipe)', path.read_text())
    ]
    assert not named, "vpipe.process.AS_MODULE says how a module is run"
