"""What ``vpipe train`` says while it runs: a compact live view on a terminal, plain lines in a log.

A log is read by people and by scripts, so a line is complete in itself, has units, and never moves. A terminal shows
the same facts in place: progress and time left, loss and throughput, and one bar per rank that says how much of the
last step it worked. VPipe's own line format is kept for those who parse it. Figures as people read them, seconds, bytes
and counts with a unit, stand at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vpipe.plan.units import format_bytes
from vpipe.process import obeys
from vpipe.rundir.facts import RunFacts

MetricsRow = Mapping[str, Any]


class Console:
    """Tells a person how the run goes.

    ``metrics`` are lines of metrics.jsonl; ``busy`` (a fraction per rank) and ``memory`` (bytes per rank) are shown
    where they are given.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        line_format: str = "vpipe",
        log_interval: int = 10,
        live: bool | None = None,
    ) -> None:
        self._stream = stream or sys.stdout
        self._line_format = line_format
        self._log_interval = log_interval
        wanted = obeys(self._stream) if live is None else live
        self._live_wanted = wanted and line_format == "vpipe" and log_interval > 0
        self._rich = RichConsole(file=self._stream, force_terminal=True if live else None, highlight=False)
        self._live: Live | None = None
        self._facts = RunFacts()
        self._last: MetricsRow = {}
        self._evaluated: MetricsRow = {}
        self._means: dict[str, _Mean] = {"seconds": _Mean(), "loss": _Mean()}
        self._began = self._epoch_began = monotonic()
        self._epoch: int | None = None
        self._first_iteration: int | None = None

    @property
    def is_live(self) -> bool:
        """Whether ranks are drawn."""
        return self._live is not None

    def start(self, facts: RunFacts) -> None:
        """The run begins: one line that says what is trained, and how."""
        self._facts = facts
        self._began = self._epoch_began = monotonic()
        self._say(describe(facts))
        if self._live_wanted:
            self._live = Live(self._view(), console=self._rich, refresh_per_second=4, transient=True)
            self._live.start()

    def iteration(self, metrics: MetricsRow) -> None:
        """A training iteration ended."""
        number, epoch = int(metrics.get("iteration", 0)), int(metrics.get("epoch", 0))
        if self._first_iteration is None:
            self._first_iteration = number
        if epoch != self._epoch:
            self._epoch, self._epoch_began = epoch, monotonic()
            self._means = {key: _Mean() for key in self._means}
        self._last = metrics
        for key, mean in self._means.items():
            mean.add(metrics.get(key))
        if self._live is not None:
            self._live.update(self._view())
        elif self._log_interval > 0 and (number % self._log_interval == 0 or number == self._first_iteration):
            self._say(self._vpipe_line(metrics) if self._line_format == "vpipe-line" else self._line(metrics))

    def evaluation(self, metrics: MetricsRow) -> None:
        """An evaluation ended."""
        self._evaluated = metrics
        over = f" over {metrics['examples']:,} examples, {metrics['targets']:,} targets" if "targets" in metrics else ""
        loss = _number(metrics.get("loss"), ".4f")
        self._say(f"iteration {metrics.get('iteration', 0)}  evaluation loss {loss}{over}")

    def message(self, text: str) -> None:
        """A sentence, above the live view."""
        self._say(text)

    def finish(self, summary: MetricsRow) -> None:
        """The run ended: what it came to."""
        self.close()
        if self._last and self._live_wanted:
            self._say(self._line(self._last))
        trained = int(summary.get("total_iterations", self._last.get("iteration", 0)))
        reached = int(summary.get("iterations_done", trained))  # more where this process has gone on from another
        parts = [f"{trained} iterations{f' (from {reached - trained} to {reached})' if reached > trained else ''}"]
        parts.append(f"in {duration(float(summary.get('total_time_seconds') or monotonic() - self._began))}")
        loss = summary.get("final_loss", self._last.get("loss"))
        parts.append(f"loss {_number(loss, '.4f')}")
        if (rate := summary.get("throughput_tokens_per_second")) is not None:
            parts.append(_rate({**self._last, "tokens_per_second": rate}))
        if isinstance(mfu := summary.get("mfu"), int | float):
            parts.append(f"MFU {mfu:.1%}")
        if lost := summary.get("ranks_lost"):
            parts.append(f"{lost} rank{'s' * (lost > 1)} lost on the way")
        if (directory := self._facts.directory) is not None:
            parts.append(f"'vpipe report {directory}' shows it")
        ending = summary.get("ending") or {}
        how = ending["kind"] if ending.get("kind") in ("stopped", "interrupted") else "done"
        self._say(f"{how}: " + ", ".join(parts))
        if ending.get("kind") != "finished" and summary.get("remedy"):
            self._say(f"{ending.get('sentence')}; {summary['remedy']}")

    def close(self) -> None:
        """Leave the terminal as it was, also after an error."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say(self, text: str) -> None:
        if self._live is not None:
            self._rich.print(Text(text))
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def _left(self) -> float | None:
        """Seconds until the last iteration, from those that have run."""
        total, done = self._facts.iterations, self._last.get("iteration")
        if not total or done is None or self._first_iteration is None:
            return None
        measured = int(done) - self._first_iteration
        if measured <= 0:
            return None
        return (monotonic() - self._began) / (measured + 1) * max(0, total - int(done))

    def _line(self, metrics: MetricsRow) -> str:
        total = self._facts.iterations
        parts = [f"iteration {metrics.get('iteration', 0)}" + (f"/{total}" if total else "")]
        parts.append(f"epoch {metrics.get('epoch', 0)}")
        parts.append(f"loss {_number(metrics.get('loss'), '.4f')}")
        parts.append(f"lr {_number(metrics.get('learning_rate'), '.3g')}")
        parts.append(_rate(metrics))
        parts.append(f"{_milliseconds(metrics.get('seconds'))} per iteration")
        if held := metrics.get("memory"):
            parts.append(f"memory {format_bytes(max(_list(held)))}")
        if skipped := metrics.get("skipped"):
            parts.append(f"{int(skipped)} updates skipped: a gradient was not finite")
        if (left := self._left()) is not None:
            parts.append(f"{duration(left)} left")
        return "  ".join(parts)

    def _vpipe_line(self, metrics: MetricsRow) -> str:
        """VPipe's: ``Stage: [3] Epoch: [0][100/2000]  Time: now (mean)  …``, tab separated."""
        per_epoch = self._facts.iterations_per_epoch or self._facts.iterations or 0
        number = int(metrics.get("iteration", 0))
        place = (number - 1) % per_epoch + 1 if per_epoch and number else number
        seconds, loss = self._means["seconds"], self._means["loss"]
        hours = (monotonic() - self._epoch_began) / 3600
        held = [value / 2**30 for value in _list(metrics.get("memory") or 0)]
        stage = (self._facts.num_stages or 1) - 1
        fields = [
            f"Stage: [{stage}] Epoch: [{metrics.get('epoch', 0)}][{place}/{per_epoch}]",
            f"Time: {_number(metrics.get('seconds'), '.3f')} ({seconds.value:.3f})",
            f"Epoch time [hr]: {hours:.3f} ({seconds.value * per_epoch / 3600:.3f})",
            f"Memory: {held[-1]:.3f} ({held[-1]:.3f})",
            f"Loss: {_number(metrics.get('loss'), '.4f')} ({loss.value:.4f})",
        ]
        return "\t".join(fields)

    def _view(self) -> Group:
        """The live view: progress, figures, one bar per rank."""
        metrics, total = self._last, self._facts.iterations or 0
        done, left = int(metrics.get("iteration", 0)), self._left()
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text(f"iteration {done}" + (f"/{total}" if total else ""), style="bold"),
            ProgressBar(total=total or None, completed=done, width=32),
            Text(f"{duration(left)} left" if left is not None else ""),
        )
        figures = Table.grid(padding=(0, 3))
        evaluated = f"evaluation {_number(self._evaluated.get('loss'), '.4f')}" if self._evaluated else ""
        figures.add_row(
            Text(f"loss {_number(metrics.get('loss'), '.4f')}", style="bold"),
            Text(evaluated),
            Text(_rate(metrics)),
            Text(f"lr {_number(metrics.get('learning_rate'), '.3g')}"),
        )
        return Group(head, figures, self._ranks(metrics))

    def _ranks(self, metrics: MetricsRow) -> Table:
        bars = Table.grid(padding=(0, 1))
        busy, held = metrics.get("busy") or [], _list(metrics.get("memory") or [])
        for rank, stages in enumerate(stages_of(self._facts)):
            share = busy[rank] if rank < len(busy) else None
            bars.add_row(
                Text(f"rank {rank}", style="dim"),
                Text("stage " + ",".join(map(str, stages)), style="dim"),
                ProgressBar(total=1.0, completed=share or 0.0, width=24),
                Text(f"{share:4.0%} busy" if share is not None else ""),
                Text(format_bytes(held[rank]) if rank < len(held) else ""),
            )
        return bars


class QuietConsole(Console):
    """Says what must be known, on standard error: warnings, and how a run ended that has not finished."""

    def __init__(self, stream: TextIO | None = None, **more: Any) -> None:
        super().__init__(stream or sys.stderr, **(more | {"live": False}))

    def start(self, facts: RunFacts) -> None:
        self._facts = facts

    def iteration(self, metrics: MetricsRow) -> None:
        self._last = metrics

    def evaluation(self, metrics: MetricsRow) -> None:
        pass

    def message(self, text: str) -> None:
        if text.startswith("warning: "):
            self._say(text)

    def finish(self, summary: MetricsRow) -> None:
        if (summary.get("ending") or {}).get("kind") != "finished":
            super().finish(summary)


class _Mean:
    """The mean of what was given."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, value: object) -> None:
        if isinstance(value, int | float):
            self._sum, self._count = self._sum + value, self._count + 1

    @property
    def value(self) -> float:
        return self._sum / self._count if self._count else 0.0


def unit(metrics: MetricsRow) -> str:
    """What a rate counts: of pictures and the like an example has no tokens."""
    return "examples" if metrics.get("samples") == metrics.get("tokens") is not None else "tokens"


def _rate(metrics: MetricsRow) -> str:
    return f"{_number(metrics.get('tokens_per_second'), ',.0f')} {unit(metrics)}/s"


def _told(fact: str | int | None) -> str:
    return "?" if fact is None else str(fact)


def _microbatches(facts: RunFacts) -> str:
    """How many units an iteration has; an asynchronous schedule runs those of several before it drains."""
    units, own = _told(facts.num_microbatches), facts.microbatches_per_iteration
    if own is None or facts.synchronous is not False or own == facts.num_microbatches:
        return f"{units} microbatches"
    return f"{own} microbatches an iteration, {units} between two drains"


def describe(facts: RunFacts) -> str:
    """One line about a run: model, schedule, ranks."""
    model = facts.model
    shape = f"{model.num_layers} × {model.hidden_size}, " if model.num_layers and model.hidden_size else ""
    size = f" ({shape}{count(model.parameters)} parameters)" if model.parameters else ""
    parts = [(model.name or "a model") + size]
    parts.append(
        f"{_told(facts.schedule)} on {_told(facts.num_ranks)} ranks, {_told(facts.num_stages)} stages, "
        f"{_microbatches(facts)}"
    )
    if partition := facts.partition:
        parts.append(f"layers {' '.join(map(str, partition))}")
    if facts.threads:
        whose = "a rank" if len(set(facts.hosts or ())) < 2 else "in rank 0"
        parts.append(f"{facts.threads} thread{'s' * (facts.threads > 1)} {whose}")
    if (directory := facts.directory) is not None:
        parts.append(f"run {directory}")
    return "; ".join(parts)


def stages_of(facts: RunFacts) -> list[list[int]]:
    """Per rank, its stages; one each where the facts say nothing."""
    placement = facts.placement
    if not placement:
        return [[rank] for rank in range(facts.num_ranks or 0)]
    held: list[list[int]] = [[] for _ in range(1 + max(rank for ranks in placement for rank in ranks))]
    for stage, ranks in enumerate(placement):
        for rank in ranks:
            held[rank].append(stage)
    return held


def _list(value: float | Sequence[float]) -> list[float]:
    return [float(each) for each in value] if isinstance(value, Sequence) else [float(value)]


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "–"


def _milliseconds(value: object) -> str:
    return f"{value * 1000:.0f} ms" if isinstance(value, int | float) else "–"


def duration(seconds: float) -> str:
    """``1h 02m``, ``3m 05s``, ``12s``, ``1.20s``."""
    if seconds < 10:
        return f"{seconds:.2f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def count(number: float) -> str:
    """``1.2M``, ``340K``, ``12``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"
