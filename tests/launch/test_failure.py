"""One rank fails: all end soon, with a non-zero code, and the first cause is the one that is shown."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import FAILING, HANG, BareRanks, Running, vpipe_run

import forked_python

slow = pytest.mark.slow
Bare = Callable[..., tuple[list[int], str]]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def fork_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torchrun; its agent is a Python of its own."""
    monkeypatch.setenv("PYTHON_EXEC", forked_python.program())


@pytest.fixture
def ran(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Run ``failing.py`` on three ranks of ``vpipe run``, forked or ``fresh``, to its end."""
    runs: list[Running] = []

    def run(*args: str, fresh: bool = False) -> Running:
        runs.append(vpipe_run(tmp_path, 3, FAILING, *args, python=sys.executable if fresh else None))
        return runs[-1]

    yield run
    for left in runs:
        left.kill_all()


@pytest.mark.rotates(2)
@pytest.mark.parametrize(
    ("how", "victim", "error", "place"),
    [
        ("forward", 1, "ValueError: the forward broke", "rank 1, stage 1, action 1F1, microbatch 1, step 2"),
        pytest.param("backward", 1, "ArithmeticError: the backward broke", "action 1B1, microbatch 1", marks=slow),
        pytest.param("loss", 2, "KeyError: 'the loss broke'", "rank 2, stage 2, action 2F0", marks=slow),
        pytest.param("script", 2, "LookupError: the script broke", "", marks=slow),
        pytest.param("forward", 0, "ValueError: the forward broke", "rank 0, stage 0, action 0F1", marks=slow),
    ],
)
def test_the_failing_rank_speaks_and_the_others_are_folded(
    ran: Callable[..., Running], how: str, victim: int, error: str, place: str
) -> None:
    run = ran(how, str(victim), fresh=True)  # where a traceback begins is part of it
    assert run.wait() == 1
    lines = run.err.splitlines()
    assert lines[0] == f"rank {victim} failed:"
    assert lines[1].startswith("Traceback")
    assert "failing.py" in lines[2]
    assert error in lines
    assert run.err.count("Traceback") == 1
    assert place in run.err
    others = [rank for rank in range(3) if rank != victim]
    assert lines[-2:] == [f"rank {rank}: ended because rank {victim} failed" for rank in others]
    run.assert_clean()


@slow
def test_a_killed_rank_is_named(ran: Callable[..., Running]) -> None:
    run = ran("kill", "1")
    assert run.wait() == 137
    assert run.err.splitlines()[0].startswith("rank 1 failed: it was killed by SIGKILL")
    assert "Traceback" not in run.err
    run.assert_clean()


def test_a_mistake_of_the_user_is_one_sentence_for_all_ranks(ran: Callable[..., Running]) -> None:
    run = ran("user", "0")
    assert run.wait() == 2
    assert len(run.err.splitlines()) == 1
    assert run.err.startswith("vpipe: ")
    assert "microbatch" in run.err
    run.assert_clean()


@slow
def test_a_layer_that_returns_garbage_is_one_sentence(ran: Callable[..., Running]) -> None:
    run = ran("garbage", "1")
    assert run.wait() == 2
    assert run.err.startswith("vpipe: ")
    assert "cannot travel" in run.err
    assert len(run.err.splitlines()) == 1
    run.assert_clean()


@slow
def test_a_stopped_rank_is_found_by_its_silence(ran: Callable[..., Running]) -> None:
    run = ran("stop", "1", "6")
    assert run.wait() == 69
    assert run.err.startswith("rank 1 has been silent for 6 s")
    run.assert_clean()


@slow
def test_an_exit_code_of_a_script_is_kept(ran: Callable[..., Running]) -> None:
    run = ran("exit", "1")
    assert run.wait() == 3
    assert run.err.splitlines()[0] == "rank 1 failed: it ended with exit code 3"
    run.assert_clean()


@pytest.fixture(scope="module")
def bare_ranks() -> Iterator[BareRanks]:
    ranks = BareRanks()
    yield ranks
    ranks.close()


@pytest.fixture
def bare(bare_ranks: BareRanks, tmp_path: Path) -> Bare:
    """Run ``failing.py`` on three ranks that nobody looks after: the exit codes, and what all have said."""
    return lambda *args: bare_ranks.run(tmp_path, FAILING, *args)


NO_DATA = """
model: {name: gpt, hidden_size: 16, num_layers: 2, num_heads: 2, sequence_length: 8}
dataset: {name: text, path: /nowhere, batch_size: 8}
parallel: {model_parallel_size: 3}
training: {num_microbatches: 4}
"""


def test_without_a_launcher_too_the_failing_rank_speaks(bare: Bare) -> None:
    codes, said = bare("forward", "1")
    assert codes == [1, 1, 1]
    assert said.count("Traceback") == 1
    assert "ValueError: the forward broke" in said
    for rank in (0, 2):
        assert (
            f"vpipe: rank {rank} ends because rank 1 failed: ValueError: the forward broke (at rank 1, stage 1" in said
        )
    assert said.index("Traceback") < said.index("ends because")


def test_ranks_with_different_programs_are_refused(bare: Bare) -> None:
    codes, said = bare("program", "1")
    assert codes == [2, 2, 2]
    assert said.count("vpipe: ") == 1
    assert "rank 1 has schedule gpipe, but rank 0 has schedule 1f1b" in said


def test_a_mistake_in_a_config_is_said_once_by_ranks_that_have_met(bare_ranks: BareRanks, tmp_path: Path) -> None:
    """``srun python -m vpipe train``: only while they open the data do the ranks find that there is none."""
    (tmp_path / "job.yaml").write_text(NO_DATA)
    (tmp_path / "script.py").write_text("import sys; from vpipe.cli.main import main; main(sys.argv[1:])")
    codes, said = bare_ranks.run(tmp_path, str(tmp_path / "script.py"), "train", str(tmp_path / "job.yaml"))
    assert codes == [2, 2, 2]
    said = re.sub(r"^\[Gloo\].*\n", "", said, flags=re.MULTILINE)  # an older torch tells that they have met
    assert said == "vpipe: there is no data at /nowhere; build it with: vpipe data build text --out /nowhere\n"


@slow
def test_a_mistake_in_a_config_is_said_once_under_torchrun(tmp_path: Path) -> None:
    """Found before the ranks meet: rank 0 speaks, and torchrun ends the others."""
    (tmp_path / "job.yaml").write_text(NO_DATA.replace("name: gpt", "nam: gpt"))
    options = ["--standalone", "--nproc-per-node=3", "-m", "vpipe", "train", str(tmp_path / "job.yaml")]
    run = Running(tmp_path, forked_python.program(), "-m", "torch.distributed.run", *options)
    assert run.wait() == 1
    assert run.err.count("model.nam is an unknown key") == 1
    run.assert_clean()


@pytest.mark.rotates(4)
@pytest.mark.parametrize(
    ("args", "codes", "words"),
    [
        pytest.param(("kill", "2"), [1, 1, -9], "rank 2 is gone: killed, or ended without a word", marks=slow),
        pytest.param(("kill", "0"), [-9, 1, 1], "rank 0, which keeps the store, is gone", marks=slow),
        pytest.param(("forward", "0"), [1, 1, 1], "because rank 0 failed: ValueError: the forward broke", marks=slow),
        pytest.param(("version", "2"), [2, 2, 2], "rank 2 runs vpipe 9.9.9, but rank 0 runs vpipe", marks=slow),
        pytest.param(("early", "1"), [1, 0, 1], "rank 1 had finished when", marks=slow),
        pytest.param(("stop", "1", "6"), [1, -9, 1], "rank 1 has been silent for 6 s", marks=slow),
        pytest.param(("stop", "0", "6"), [-9, 1, 1], "rank 0, which keeps the store, has been silent", marks=slow),
        pytest.param(("never", "1", "2"), [1, 1, 1], "rank 1 of 3 has not come within 2 s", marks=slow),
        pytest.param(("script", "2"), [1, 1, 1], "because rank 2 failed: LookupError: the script broke", marks=slow),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_without_a_launcher_all_end(bare: Bare, args: tuple[str, ...], codes: list[int], words: str) -> None:
    found, said = bare(*args)
    assert found == codes, said
    assert words in said


@slow
def test_whoever_keeps_the_store_waits_for_a_rank_that_ends_late(bare: Bare) -> None:
    """As on a busy machine: the last rank gets no processor for a while when all work is done."""
    found, said = bare("late", "2")
    assert found == [0, 0, 0], said


RESTARTED = """
import os, signal
import torch, vpipe
from torch import nn

generation, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
torch.manual_seed(0)
layers = [nn.Linear(4, 4) for _ in range(2)]
pipe = vpipe.Pipeline(layers, nn.functional.mse_loss)
x = torch.randn(8, 4)
for step in range(4):
    pipe.train_step(x, x, update=False)  # an optimizer would import torch._dynamo, in every process
    if generation == 0 and rank == 1 and step == 1:
        os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    print("finished generation", generation)
"""


@pytest.mark.rotates(1)
@slow
@pytest.mark.parametrize("rendezvous", ["--standalone", "--rdzv-backend=static"])
def test_torchrun_restarts_after_a_kill(tmp_path: Path, rendezvous: str) -> None:
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--nproc-per-node=2", "--max-restarts=2", rendezvous]
    options += [] if rendezvous == "--standalone" else [f"--master-port={port}"]
    run = Running(tmp_path, sys.executable, "-m", "torch.distributed.run", *options, str(script))
    try:
        assert run.wait() == 0, run.err
        assert "finished generation 1" in run.out
    finally:
        run.kill_all()


@slow
def test_torchrun_over_two_nodes_trains_as_one_process_does(tmp_path: Path) -> None:
    """Two agents, as on two machines, with a rank each."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {name: gpt, num_layers: 2, hidden_size: 16, num_heads: 2, sequence_length: 8}\n"
        "dataset: {name: synthetic, batch_size: 8, extra: {vocab_size: 32, num_examples: 16}}\n"
        "training: {max_iterations: 2, num_microbatches: 4}\n"
        "parallel: {model_parallel_size: 2, scheduler: 1f1b}\n"
        "observe: {trace: false}\ncheckpoint: {interval: -1}\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nodes = []
    for node in range(2):
        words = ["--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", f"--master-port={port}"]
        train = ["-m", "vpipe", "train", str(config), "--output-dir", str(tmp_path / "run")]
        place = tmp_path / f"node{node}"
        place.mkdir()
        agent = [forked_python.program(), "-m", "torch.distributed.run"]
        command = [*agent, *words, "--master-addr=127.0.0.1", *train]
        nodes.append(Running(place, *command))
    try:
        for node in nodes:
            assert node.wait() == 0, node.err
        assert "done: 2 iterations" in nodes[0].out
        assert "done" not in nodes[1].out
    finally:
        for node in nodes:
            node.kill_all()
    words = ["-m", "vpipe", "train", str(config), "--set", "parallel.transport=inprocess"]
    alone = [forked_python.program(), *words, "--output-dir", str(tmp_path / "alone")]
    subprocess.run(alone, check=True, capture_output=True, timeout=HANG)
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("run", "alone")
    ]
    assert losses[0] == losses[1]
