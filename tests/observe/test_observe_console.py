"""The terminal: plain lines in a log, VPipe's line, a live view that leaves the terminal as it was."""

from __future__ import annotations

import io
import os
import pty
import re
from contextlib import suppress

import pytest

from vpipe.observe.console import Console, count, duration
from vpipe.rundir.facts import RunFacts, RunModel

FACTS = RunFacts(
    schedule="1f1b", num_ranks=2, num_stages=4, num_microbatches=8, partition=(2, 2),
    model=RunModel("gpt", 1_234_567), placement=((0,), (1,), (0,), (1,)),
    iterations=200, iterations_per_epoch=100, directory="runs/x", threads=1,
)  # fmt: skip


def line(iteration: int, **more: object) -> dict[str, object]:
    return {"kind": "train", "iteration": iteration, "epoch": iteration // 100, "loss": 8.34214, "learning_rate": 3e-4,
            "tokens_per_second": 12345.6, "seconds": 0.512, "skipped": 0, **more}  # fmt: skip


def run(console: Console, stream: io.StringIO) -> str:
    console.start(FACTS)
    for number in range(1, 21):
        console.iteration(line(number, busy=[0.7, 0.8], memory=[2**30, 2**29]))
    console.evaluation({"kind": "evaluation", "iteration": 20, "loss": 7.5})
    console.message("a word")
    console.finish(
        {"total_iterations": 20, "total_time_seconds": 10.24, "throughput_tokens_per_second": 12000.0, "mfu": "n/a"}
    )
    return stream.getvalue()


def test_a_log_gets_plain_whole_lines() -> None:
    stream = io.StringIO()
    text = run(Console(stream), stream)
    assert "\x1b" not in text
    lines = text.splitlines()
    assert (
        lines[0]
        == "gpt (1.23M parameters); 1f1b on 2 ranks, 4 stages, 8 microbatches; layers 2 2; 1 thread a rank; run runs/x"
    )
    assert [each.split("  ")[0] for each in lines[1:4]] == ["iteration 1/200", "iteration 10/200", "iteration 20/200"]
    assert "loss 8.3421" in lines[1]
    assert "12,346 tokens/s" in lines[1]
    assert lines[4:6] == ["iteration 20  evaluation loss 7.5000", "a word"]
    assert lines[-1].startswith("done: 20 iterations, in 10s, loss 8.3421, 12,000 tokens/s")


def test_a_process_that_went_on_from_another_says_where() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.start(FACTS)
    console.finish({"total_iterations": 157, "iterations_done": 256, "total_time_seconds": 30.0})
    assert "done: 157 iterations (from 99 to 256), in 30s" in stream.getvalue()


def test_vpipes_line_is_kept() -> None:
    stream = io.StringIO()
    text = run(Console(stream, line_format="vpipe-line"), stream)
    form = (
        r"Stage: \[3\] Epoch: \[0\]\[10/100\]\tTime: 0\.512 \(0\.512\)\tEpoch time \[hr\]: \d\.\d{3} \(0\.014\)\t"
        r"Memory: 0\.500 \(0\.500\)\tLoss: 8\.3421 \(8\.3421\)"
    )
    assert any(re.fullmatch(form, each) for each in text.splitlines()), text


def test_nothing_is_said_when_nothing_is_asked() -> None:
    stream = io.StringIO()
    console = Console(stream, log_interval=0)
    console.start(FACTS)
    console.iteration(line(1))
    assert "iteration" not in stream.getvalue()


def test_a_terminal_gets_a_live_view() -> None:
    stream = io.StringIO()
    text = run(Console(stream, live=True), stream)
    assert "busy" in text
    assert "rank 1" in text
    assert "stage 1,3" in text
    assert "\x1b[?25h" in text.split("done:")[0]  # the cursor is back


def test_figures_that_are_missing_are_dashes() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.start(RunFacts())
    console.iteration({"iteration": 1, "loss": None})
    console.finish({})
    assert "loss –" in stream.getvalue()


def test_words() -> None:
    assert [duration(x) for x in (1.2, 12, 185, 3725)] == ["1.20s", "12s", "3m 05s", "1h 02m"]
    assert [count(x) for x in (12, 340_000, 1.2e6)] == ["12", "340K", "1.2M"]


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_dumb_terminal_gets_lines(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    ours, its = pty.openpty()
    with os.fdopen(its, "w") as stream:
        console = Console(stream, log_interval=1)
        console.start(RunFacts(schedule="1f1b", num_ranks=2, iterations=1))
        console.iteration({"iteration": 1, "loss": 1.0})
        console.close()
    said = b""
    with os.fdopen(ours, "rb", buffering=0) as end, suppress(OSError):  # Linux says so that the other end is closed
        while part := end.read(65536):
            said += part
    assert (b"\x1b" in said) == (term == "xterm")
    assert b"iteration 1/1" in said


def test_pictures_have_examples_and_no_tokens() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.start(FACTS)
    console.iteration(line(1, tokens=16, samples=16))
    console.finish({"total_iterations": 1, "total_time_seconds": 1.0, "throughput_tokens_per_second": 12000.0})
    assert stream.getvalue().count(" examples/s") == 2
    assert "tokens" not in stream.getvalue()
