"""Ranks that are killed and stopped: the run goes on and ends with the same bytes."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed
import yaml
from running import Running

import forked_python
from vpipe.cli import train
from vpipe.config import PipelineConfig
from vpipe.errors import UserError
from vpipe.launch import chaos
from vpipe.rundir import roster as rosters
from vpipe.rundir.manifest import MANIFEST, checkpoints
from vpipe.rundir.roster import Roster
from vpipe.runtime.ranks import membership
from vpipe.runtime.ranks.control import Aborted, Control, EpochOrder
from vpipe.train.preflight import refuse
from vpipe.train.sizes import placed, resized

CONFIG: dict[str, Any] = {
    "model": {
        "name": "gpt",
        "hidden_size": 16,
        "num_layers": 4,
        "num_heads": 2,
        "sequence_length": 8,
        "extra": {"dropout": 0.1},
    },
    "dataset": {
        "name": "synthetic",
        "batch_size": 8,
        "extra": {"vocab_size": 32, "num_examples": 800, "num_valid_examples": 16},
    },
    "training": {"num_microbatches": 4, "epochs": 1, "evaluation_interval": -1, "gradient_clipping": 1.0},
    "parallel": {"model_parallel_size": 3, "scheduler": "1f1b", "device": "cpu"},
    "checkpoint": {"interval": 15},
    "observe": {"trace": False},
    "launch": {"threads": 1},
}
"""A hundred iterations."""
TAUGHT = Path(__file__).with_name("taught.py")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


LONG = ("--set", "training.max_iterations=5000", "--set", "dataset.extra.num_examples=80000")
"""So many that no busy machine comes to their end before it is stopped."""


def assert_goes_on(words: Sequence[str], folder: Path, plain: Path) -> None:
    """From its one checkpoint, two iterations more, on this machine, end as in a run that was left alone."""
    (saved,) = checkpoints(folder / "checkpoints")
    iteration = json.loads((saved / MANIFEST).read_text())["position"]["iteration"]
    shorter = (*words, "--set", f"training.max_iterations={iteration + 2}", "--quiet")
    done = vpipe("train", *shorter, "--resume", folder, "--output-dir", folder)
    assert done.returncode == 0, done.stderr
    assert vpipe("train", *shorter, "--output-dir", plain).returncode == 0
    assert chaos.differences(plain, folder) == []


def vpipe(*words: object) -> subprocess.CompletedProcess[str]:
    command = [forked_python.program(), "-m", "vpipe", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_and_stopped_ranks_change_no_bit(config: Path, tmp_path: Path) -> None:
    """Layers move meanwhile, as asked and by themselves; frozen weights change, and all that is told is compared."""
    blows = ("--kills", 4, "--stops", 1, "--moves", 3, "--seed", 5, "--set", "parallel.adapt=on")
    model = ("--plugin", TAUGHT, "--set", "model.name=taught", "--set", "model.extra={}")
    blows = (*blows, *model, "--set", "training.evaluation_interval=20")
    done = vpipe("chaos", config, *blows, "--json", "--output-dir", tmp_path / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["equal"]
    assert (found["kills"], found["stops"], found["moves"]) == (4, 1, 3)
    assert found["recoveries"] >= 1
    lines = [json.loads(line) for line in (tmp_path / "runs" / "broken-1" / "metrics.jsonl").read_text().splitlines()]
    told = [line for line in lines if line["kind"] == "recovery"]
    assert told[0]["seconds"].keys() == {"agreed", "groups", "state", "replay"}
    assert told[0]["lost"][0].startswith("rank ")
    assert told[0]["losses"] >= 1
    assert json.loads((tmp_path / "runs" / "broken-1" / "summary.json").read_text())["ranks_lost"] >= told[-1]["losses"]


SLOW = """
import os, time
from vpipe.train import copies

copy, late = copies._copy, iter([1.0] * 2)

def copy_late(pairs):
    if os.environ.get("VPIPE_SLOT") == "2":
        time.sleep(next(late, 0.0))
    copy(pairs)

copies._copy = copy_late
"""
"""A plug-in by which the first copy of one rank comes late."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("lost", "counts"), [("launcher", (3, 2, 4)), ("zygote", (3,))])
def test_fewer_and_more_ranks_and_a_killed_launcher_or_zygote_change_no_bit(
    lost: str, counts: tuple[int, ...], config: Path, tmp_path: Path
) -> None:
    """3 ranks, 2, 4; then who leads them is killed: no rank stays, and the newest copy is a checkpoint to go on from.
    Once a rank has told of a step, all have a whole copy, however slowly one of them writes it."""
    (tmp_path / "slow.py").write_text(SLOW)
    words = (str(config), "--plugin", str(tmp_path / "slow.py"), "--set", "checkpoint.interval=100000", *LONG)
    train = [forked_python.program(), "-m", "vpipe", "train", *words]
    folder = tmp_path / "run"
    running = Running(tmp_path, *train, "--elastic", "2:4", "--output-dir", str(folder))
    for num_ranks in counts:
        if num_ranks != 3:
            assert vpipe("scale", folder, num_ranks).returncode == 0
        while (roster := Roster.read(folder)) is None or len(roster.ranks) != num_ranks or not roster.has_stepped:
            assert running.process.poll() is None, running.out + running.err
            time.sleep(0.02)
    psutil.Process(roster.pids[0]).parents()[lost == "launcher"].kill()
    assert running.process.wait() == (137 if lost == "launcher" else 1)
    running.assert_clean(60)
    if lost == "zygote":
        assert "the process that started the ranks has ended\nvpipe: the checkpoint of iteration" in running.err
    assert_goes_on(words, folder, tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_asked_to_stop_during_a_recovery_saves_and_leaves(config: Path, tmp_path: Path) -> None:
    """Its ranks waited for an order until they were killed, and nothing was saved."""
    folder = tmp_path / "run"
    words = ("--elastic", "3:3", "--set", "checkpoint.interval=1000", "--output-dir", str(folder))
    running = Running(tmp_path, forked_python.program(), "-m", "vpipe", "train", str(config), *words)
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 5:  # a copy of an earlier step is whole
        assert running.process.poll() is None, running.out + running.err
        time.sleep(0.02)
    roster = Roster.read(folder)
    assert roster is not None
    lost = roster.pids[1]
    os.kill(lost, signal.SIGKILL)
    while (roster := Roster.read(folder)) is None or roster.pids.get(1, lost) == lost:
        time.sleep(0.01)
    running.process.terminate()
    assert running.process.wait() == 75, running.out + running.err
    running.assert_clean(60)
    assert len(checkpoints(folder / "checkpoints")) == 1


STUCK = """
import ctypes, os
from pathlib import Path
from torch import nn

HERE, FORWARD = Path({here!r}), nn.LayerNorm.forward


def forward(self, x):
    if os.environ.get("VPIPE_SLOT") == "1" and (HERE / "now").exists() and not (HERE / "stuck").exists():
        (HERE / "stuck").touch()
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)  # no signal ends this, and the process is well
    return FORWARD(self, x)


nn.LayerNorm.forward = forward
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_cannot_be_interrupted_is_replaced(config: Path, tmp_path: Path) -> None:
    """It is in a wait that no signal ends when another one is lost (as in gloo's, while ranks meet)."""
    (tmp_path / "stuck.py").write_text(STUCK.format(here=str(tmp_path)))
    words = (str(config), "--plugin", str(tmp_path / "stuck.py"))
    assert vpipe("train", *words, "--output-dir", tmp_path / "plain").returncode == 0
    folder = tmp_path / "run"
    train = ("-m", "vpipe", "train", *words, "--elastic", "2:3", "--output-dir", str(folder))
    running = Running(tmp_path, forked_python.program(), *train)
    while (roster := Roster.read(folder)) is None or not roster.has_stepped:
        assert running.process.poll() is None, running.out + running.err
        time.sleep(0.02)
    (tmp_path / "now").touch()
    while not (tmp_path / "stuck").exists():
        assert running.process.poll() is None, running.out + running.err
        time.sleep(0.02)
    os.kill(roster.pids[2], signal.SIGKILL)
    assert running.wait() == 0, running.err
    assert "rank 1 has not left what it waits for within 10 s; it is ended" in running.err
    assert chaos.differences(tmp_path / "plain", folder) == []


def test_the_judge_sees_one_stale_tensor(tmp_path: Path) -> None:
    """Negative control: a run that differs in one number of one layer's optimizer state is not equal."""
    for name in ("left", "right", "stale", "loss"):
        folder = tmp_path / name / "checkpoints" / "iteration-000003"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"position": {"iteration": 3}}))
        header = json.dumps(
            {
                "param/weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "optimizer/weight/exp_avg": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
            }
        ).encode()
        data = bytes(15) + (b"\1" if name == "stale" else b"\0")
        (folder / "layer-0000.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
        loss = 2.5 if name == "loss" else 2.0
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"kind": "train", "iteration": 3, "loss": loss}))
    assert chaos.differences(tmp_path / "left", tmp_path / "right") == []
    (said,) = chaos.differences(tmp_path / "left", tmp_path / "stale")
    assert "optimizer/weight/exp_avg" in said
    (said,) = chaos.differences(tmp_path / "left", tmp_path / "loss")
    assert "iteration 3" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"launch": {"elastic": "4:5"}}, "launch.elastic is 4:5, but the run has 3 ranks"),
        ({"parallel": {"transport": "inprocess"}}, "needs a process for every rank"),
        ({"parallel": {"scheduler": "async_threaded"}}, "worker threads"),
        ({"parallel": {"recompute": [0.5, 0.5, 0.0]}}, "parallel.recompute says something about each"),
        ({"model": {"split_head": True}}, "model.split_head says something about each"),
        (
            {"parallel": {"scheduler": "pipedream", "schedule_options": {"depths": [2, 1, 0]}}},
            "parallel.schedule_options.depths says something about each",
        ),
        (
            {"parallel": {"scheduler": "zb_auto", "schedule_options": {"costs": [[1, 1, 1]] * 3}}},
            "parallel.schedule_options.costs says something about each",
        ),
        ({"parallel": {"device": "cuda"}}, "'cuda' is not on this machine"),
        ({"launch": {"elastic": "3:9"}}, "9"),
    ],
)
def test_what_cannot_be_elastic_is_refused_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    values = json.loads(json.dumps(CONFIG))
    values["launch"]["elastic"] = "2:4"
    for section, inner in changes.items():
        values[section].update(inner)
    with pytest.raises(UserError, match=words):
        refuse(values)


def test_a_refusal_has_exit_code_2(config: Path) -> None:
    done = vpipe("train", config, "--elastic", "4:5")
    assert done.returncode == 2
    assert "launch.elastic is 4:5" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--to", "ray"), "launch.elastic is 2:3, but ranks that Ray starts cannot come and go"),
        (("--nodes", "1-2", "--with", "ntasks_per_node=1"), "2 nodes x 1 places are 2, but launch.elastic is 2:3"),
        (("--nodes", "3-2"), "--nodes 3-2 is neither a number of nodes nor MIN-MAX"),
        (("--nodes", "2", "--set", "parallel.partition=[2,2,2]", "--set", "launch.elastic=null"), "cannot be spread"),
    ],
)
def test_a_job_that_cannot_be_elastic_is_refused_before_it_waits_in_a_queue(
    config: Path, words: tuple[str, ...], said: str
) -> None:
    done = vpipe("submit", config, "--dry-run", "--set", "launch.elastic='2:3'", *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_an_elastic_job_has_a_launcher_and_keeps_its_other_nodes(config: Path) -> None:
    done = vpipe("submit", config, "--dry-run", "--set", "launch.elastic='2:3'", "--nodes", "2-3")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=2-3\n#SBATCH --mincpus=1\n" in done.stdout
    assert "#SBATCH --no-kill\n" in done.stdout
    assert "\nsrun" not in done.stdout, "the launcher starts a step on each node"
    assert "--set launch.through=srun --set launch.slurm.ntasks_per_node=1 --output-dir" in done.stdout
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True, timeout=10)


@pytest.mark.parametrize(
    ("nodes", "per_node", "elastic", "machines"),
    [
        ("abc", 1, "2:3", ["a:0", "b:0", "c:0"]),
        ("ab", 2, "2:4", ["a:0", "a:1", "b:0", "b:1"]),
        ("ab", 1, "2:3", ["a:0", "b:0"]),
        ("a", 2, "2:4", ["a:0", "a:1"]),
        ("abcd", 1, "2:4", ["a:0", "b:0", "c:0", "d:0"]),
    ],
)
def test_ranks_take_the_places_that_a_job_has(nodes: str, per_node: int, elastic: str, machines: list[str]) -> None:
    """Neighbours side by side; the places that are left are spares."""
    launch = {"elastic": elastic, "slurm": {"ntasks_per_node": per_node}}
    found = placed(PipelineConfig.model_validate(CONFIG | {"launch": launch}), nodes)
    assert list(found.launch.machines) == machines
    assert found.num_ranks == min(3, len(machines))
    assert found.launch.elastic == f"2:{len(machines)}"


def test_a_job_with_too_few_places_is_refused() -> None:
    launch = {"elastic": "2:3", "slurm": {"ntasks_per_node": 1}}
    with pytest.raises(UserError, match=r"1 nodes with 1 places each, but launch.elastic is 2:3: 1 ranks are too few"):
        placed(PipelineConfig.model_validate(CONFIG | {"launch": launch}), "a")


def test_a_meeting_that_was_broken_off_leaves_no_count_behind() -> None:
    """torch names groups by a count: a rank that lost its peers while they met waited five minutes under another
    name than they."""
    c10d: Any = torch.distributed.distributed_c10d
    c10d._process_group_name([], False)  # as init_process_group does before it connects
    membership.leave()
    assert c10d._world.group_count == 0


def test_an_abort_tears_no_module_and_no_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes while a module is imported, then while a context is entered, and ends the epoch after that. (A
    process whose torch._dynamo was half there failed in its next epoch.)"""
    launcher, ours = socket.socketpair()
    before = signal.getsignal(signal.SIGUSR2)
    control = Control(ours, 0)
    obey, heard = signal.getsignal(signal.SIGUSR2), 0

    def hear(number: int, frame: Any) -> None:
        nonlocal heard
        heard += 1
        obey(number, frame)  # type: ignore[operator]

    def until(count: int) -> None:
        while heard < count:
            time.sleep(0.01)

    @contextmanager
    def entered() -> Iterator[None]:
        until(heard + 1)
        yield

    def disturbed() -> None:
        with control.epoch(EpochOrder(1, 0, 2)):
            launcher.sendall(b'{"abort": 1}\n')
            assert importlib.import_module("module_that_takes_long").WHOLE
            with entered():
                until(heard + 2)

    monkeypatch.setattr("builtins.until_heard", lambda: until(1), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "module_that_takes_long.py").write_text("until_heard()\nWHOLE = True\n")
    signal.signal(signal.SIGUSR2, hear)
    try:
        with pytest.raises(Aborted):
            disturbed()
    finally:
        launcher.close()
        signal.signal(signal.SIGUSR2, before)


def test_where_nothing_is_to_be_broken_chaos_says_so(config: Path) -> None:
    done = vpipe("chaos", config, "--kills", 0)
    assert done.returncode == 2
    assert "give --kills, --stops or --moves" in done.stderr


def test_what_is_wanted_from_outside_is_taken_once(tmp_path: Path) -> None:
    rosters.want_layout(tmp_path, [2, 1], [1, 0])
    wanted = rosters.take_wanted(tmp_path)
    assert wanted is not None
    assert json.loads(wanted.wish) == {"partition": [2, 1], "ranks": [1, 0]}
    assert rosters.take_wanted(tmp_path) is None
    rosters.want(tmp_path, 3)
    assert rosters.take_wanted(tmp_path) == rosters.OutsideWish(3)
    rosters.want_back(tmp_path, ["n2"])
    assert rosters.take_wanted(tmp_path) == rosters.OutsideWish(without=("n2",))
    rosters.want(tmp_path, 3)
    rosters.want_back(tmp_path, ["n2"])
    rosters.want(tmp_path, 2)
    assert rosters.take_wanted(tmp_path) == rosters.OutsideWish(2, without=("n2",)), "two kinds; of each the last"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("not json", "is no JSON object"),
        ("[]", "is no JSON object"),
        ('{"layout": "no json"}', "asks for layout no json, not partition and ranks, two lists of whole numbers"),
        ('{"layout": {"partition": [2, "x"], "ranks": [0, 1]}}', "two lists of whole numbers"),
        ('{"layout": {"partition": [2, 1]}}', "two lists of whole numbers"),
        ('{"ranks": -5}', "asks for ranks -5, not a number of ranks"),
        ('{"ranks": true, "without": "n2"}', "asks for ranks True, not a number of ranks; without n2, not a list of"),
    ],
)
def test_what_is_wanted_and_not_understood_is_said_and_ends_no_run(text: str, problem: str, tmp_path: Path) -> None:
    """Words that were no JSON ended all ranks."""
    (tmp_path / "wanted.json").write_text(text)
    wanted = rosters.take_wanted(tmp_path)
    assert wanted is not None
    assert wanted.problem.startswith("wanted.json ")
    assert problem in wanted.problem
    assert (wanted.num_ranks, wanted.wish, wanted.without) == (0, "", ())


@pytest.mark.parametrize(
    ("num_ranks", "moved", "partition"),
    [(3, (), "auto"), (3, (1, 1, 4), (1, 1, 4)), (2, (), "auto"), (2, (5, 1), (5, 1))],
)
def test_layers_stay_where_they_have_moved_to(num_ranks: int, moved: tuple[int, ...], partition: Any) -> None:
    found = resized(PipelineConfig.model_validate(CONFIG), num_ranks, moved)
    assert (found.num_ranks, found.parallel.partition) == (num_ranks, partition)


def test_under_another_launcher_the_run_takes_the_ranks_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PipelineConfig.model_validate(CONFIG | {"launch": {"elastic": "2:4"}})
    assert train._as_started(config, None, None) == (config, None)
    monkeypatch.setenv("RANK", "0")
    for num_ranks in (2, 3, 4):
        monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
        found, resume = train._as_started(config, tmp_path, None)
        assert (found.num_ranks, found.launch.elastic, resume) == (num_ranks, None, "latest")
    with pytest.raises(UserError, match="give --output-dir"):
        train._as_started(config, None, None)
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(UserError, match=r"has started 5 ranks, but launch.elastic is 2:4"):
        train._as_started(config, tmp_path, None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_that_torchrun_starts_again_may_be_fewer_and_change_no_bit(config: Path, tmp_path: Path) -> None:
    words = (str(config), "--set", "training.max_iterations=8", "--set", "checkpoint.interval=4")
    more = ("--set", "launch.elastic='2:3'", "--output-dir", str(tmp_path / "run"), "--quiet")
    for ranks, last in ((3, 4), (2, 8)):
        torchrun = [forked_python.program(), "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
        stop = ("--set", f"training.max_iterations={last}")
        done = subprocess.run(
            [*torchrun, "-m", "vpipe", "train", *words, *more, *stop], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert vpipe("train", *words, "--output-dir", tmp_path / "plain", "--quiet").returncode == 0
    assert chaos.differences(tmp_path / "plain", tmp_path / "run") == []


@pytest.mark.parametrize(
    ("scheduler", "on_loss", "warned"),
    [("pipedream", "shrink", True), ("1f1b", "shrink", False), ("pipedream", "replace", False)],
)
def test_an_asynchronous_run_that_may_shrink_says_that_its_bits_change(
    scheduler: str, on_loss: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = {"launch": {"elastic": "2:3", "on_loss": on_loss}}
    parallel = {"parallel": CONFIG["parallel"] | {"scheduler": scheduler}}
    assert train._elastic(PipelineConfig.model_validate(CONFIG | parallel | launch)) is not None
    assert ("does not end with the same bits" in capsys.readouterr().err) is warned


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_live_page_has_one_address_however_many_ranks_are_lost(config: Path, tmp_path: Path) -> None:
    """Port and token changed with every recovery: an open page was dead after the first loss."""
    pytest.importorskip("uvicorn", reason="the live page needs vpipe[dashboard]")
    folder = tmp_path / "run"
    words = ("--elastic", "3:3", "--set", "observe.dashboard=true", *LONG, "--output-dir", str(folder))
    running = Running(tmp_path, forked_python.program(), "-m", "vpipe", "train", str(config), *words)
    addresses = []
    for epoch in (1, 2, 3):
        while (roster := Roster.read(folder)) is None or not roster.has_stepped or roster.epoch < epoch:
            assert running.process.poll() is None, running.out + running.err
            time.sleep(0.02)
        addresses.append((folder / "page.url").read_text())
        os.kill(roster.pids[0], signal.SIGKILL)
    assert len(set(addresses)) == 1
    with urllib.request.urlopen(addresses[0].strip().replace("/?", "/data?"), timeout=60) as page:
        assert json.loads(page.read())["facts"]["num_ranks"] == 3
    running.process.terminate()
    running.process.wait(120)
    running.assert_clean(60)
    assert not (folder / "page.url").exists()


def test_chaos_refuses_what_cannot_be_elastic_before_it_trains(config: Path, tmp_path: Path) -> None:
    """It said "train longer" after a whole run."""
    done = vpipe("chaos", config, "--set", "parallel.scheduler=async_threaded", "--output-dir", tmp_path / "runs")
    assert done.returncode == 2
    assert "async_threaded runs worker threads, which cannot be interrupted" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"seconds": 9.0, "tokens_per_second": 1.0, "time": 3.0}, ""),
        ({"tokens_per_second": 0.0}, "tells False as tokens_per_second of iteration 2 (train), not True"),
        ({"tokens": 0}, "tells 0 as tokens of iteration 2 (train), not 64"),
        ({"learning_rate": 0.1}, "tells 0.1 as learning_rate of iteration 2 (train), not 0.2"),
        ({"kind": "evaluation", "loss": 0.0}, "tells 0.0 as loss of iteration 2 (evaluation), not 3.5"),
    ],
)
def test_everything_that_is_told_is_compared(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    """Evaluations of 0.0000 and rates of 0 after a move went unseen: only losses were compared."""
    line = {"kind": "train", "iteration": 2, "loss": 4.0, "learning_rate": 0.2, "tokens": 64, "seconds": 1.0}
    lines = [line | {"tokens_per_second": 64.0, "time": 1.0}, {"kind": "evaluation", "iteration": 2, "loss": 3.5}]
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        own = [each | change if each["kind"] == change.get("kind", "train") else each for each in lines]
        text = "\n".join(map(json.dumps, own if folder == "other" else lines))
        (tmp_path / folder / "metrics.jsonl").write_text(text + "\n")
    found = list(chaos._of_what_is_told(tmp_path / "one", tmp_path / "other"))
    assert [each.split(" ", 1)[1] for each in found] == ([says] if says else [])
