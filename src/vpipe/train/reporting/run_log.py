"""What a run shows and writes down while it goes: lines, metrics.jsonl, loggers, events; and what it
achieved, in OurGPipe's keys: time, tokens, throughput, MFU.

Every rank has a ``RunLog``; what only one should do, the leader's does: the process that holds rank 0.

Of what was achieved warm-up and profiled iterations are left out. MFU is the model's FLOPs over the dense peak of the
number format really used; where the peak of a device is not known it is ``n/a``, not a guess. This is the one file in
which vendors and their products stand. The rest of vpipe knows ``torch.accelerator`` alone; a device that is not in the
table trains all the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from operator import add
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

import torch

from vpipe import __version__
from vpipe.observe.console import Console
from vpipe.observe.loggers import LOGGERS
from vpipe.process import num_cores, resident_bytes
from vpipe.rundir.claim import command
from vpipe.rundir.facts import RunFacts, RunModel, RunStage
from vpipe.rundir.journal import Beat, Ending, Heart, Journal
from vpipe.rundir.layout import METRICS
from vpipe.rundir.reader import RunDirectory
from vpipe.rundir.recorder import FRESH, Recorder, run_ahead
from vpipe.runtime.device import take_peak
from vpipe.runtime.job import Record
from vpipe.runtime.moves.moving import Moved
from vpipe.schedule.action import Kind
from vpipe.schedule.program import Program, to_csv
from vpipe.schedule.semantics import LANE, Lane, version_table
from vpipe.train.reporting.clocks import Clocks
from vpipe.train.reporting.peaks import CPU, peak_flops
from vpipe.train.session import Session

if TYPE_CHECKING:
    from vpipe.runtime.memory.live import LiveBytes
    from vpipe.train.adapt import Decision

KINDS = tuple(Kind)
COUNTED_STEP = 2
MOST_BYTES = 4096
"""Of a file of steps, whose last line is wanted."""


class RunLog:
    """Tells what happens in a run."""

    def __init__(self, session: Session, directory: Path, run: str, console: Console | None) -> None:
        self._session = session
        self._observe = session.config.observe
        self.is_leader = session.pipeline.is_leader
        self._console = console
        self._journal = Journal(directory, run, self.say) if self.is_leader else None
        self._heart = Heart(directory, run).start() if self.is_leader else None
        self._directory = directory
        self._run = run
        wanted = [make for name, make in LOGGERS.items() if self.is_leader and getattr(self._observe, name)]
        self._loggers = [make(directory, session.config.model_dump(mode="json")) for make in wanted]
        ranks = session.pipeline.ranks if self._observe.trace else []
        self._recorders = [Recorder(directory, rank) for rank in ranks]
        self._clocks = Clocks(session.pipeline) if self._recorders else None
        self._recorded: Program | None = None
        self._live: LiveBytes | None = None
        self._num_steps = 0
        self._facts = RunFacts()
        self._looked: tuple[float, dict[str, Any]] = (0.0, {})
        """When the steps of all ranks were read last, and what the terminal says of them."""

    def say(self, text: str) -> None:
        if self._console is not None:
            self._console.message(text)

    def start(self, facts: RunFacts) -> None:
        self._facts = facts
        if self._journal is not None:
            self._journal.facts(facts)
        if self._console is not None:
            self._console.start(facts)

    def resumed(self, iteration: int) -> None:
        """Mark in metrics.jsonl where this run goes on: what another one wrote there beyond is not this run's."""
        if self._journal is not None and (self._directory / METRICS).exists():
            self._journal.metrics({"kind": "resume", "iteration": iteration, "run": self._run, "time": time()})

    def adapted(self, iteration: int, decision: Decision, moved: Moved | None, facts: RunFacts | None) -> None:
        """A decision of ``parallel.adapt``; after a move, ``facts`` are those of the new layout."""
        suggests = decision.moves and moved is None
        done = f": moved in {moved.seconds:.2g} s" if moved else "; parallel.adapt: on would move" if suggests else ""
        self.say(f"iteration {iteration}  {decision.reason}{done}")
        if self._journal is None:
            return
        action = "move" if moved else "suggest" if suggests else "keep"
        line: dict[str, Any] = {"kind": "adapt", "iteration": iteration, "action": action, "time": time()}
        line |= {"partition": list(decision.partition), "reason": f"{decision.reason}{done}", "gain": decision.gain}
        if moved is not None and facts is not None:
            line |= {"layout": facts.layout, "seconds": moved.seconds, "layers": len(moved.difference.transfers)}
            self._facts = self._facts.moved(facts)
            self._journal.facts(self._facts)
        self._journal.metrics(line)

    def beat(self, change: Callable[[Beat], None], at_once: bool = False) -> None:
        """Change what the heartbeat says."""
        if self._heart is not None:
            self._heart.tell(change, at_once)

    def recovered(self, iteration: int, num_ranks: int, facts: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        """An elastic run goes on after a loss or a change: who was lost, and what the time until now went to."""
        if self._journal is not None:
            line = {"kind": "recovery", "iteration": iteration, "ranks": num_ranks, **facts, "seconds": dict(seconds)}
            self._journal.metrics(line | {"time": time()})
            parts = ", ".join(f"{name} {spent:.2f}" for name, spent in seconds.items())
            lost = "; ".join(facts.get("lost", ()))
            self.say(f"{lost}: {num_ranks} ranks go on after {sum(seconds.values()):.2f} s ({parts})")

    def align_clocks(self, iteration: int) -> None:
        """Before an iteration, on all ranks."""
        if self._clocks is None:
            return
        before = self._clocks.error
        self._clocks.align(iteration)
        for recorder in self._recorders:
            recorder.offset_ns = self._clocks.offset.nanoseconds
        if before is None and self._clocks.error is not None:
            self.say(f"the ranks read different clocks; aligned within {self._clocks.error / 1e3:.0f} µs")

    def counted(self) -> AbstractContextManager[Any]:
        """Around a training step: the second one is counted, when optimizers have their states and others warm up."""
        self._num_steps += 1
        if self._num_steps != COUNTED_STEP or not self._recorders or self._session.pipeline.has_workers:
            return nullcontext()
        from vpipe.runtime.memory.live import LiveBytes  # when layers have been compiled, if they are

        self._live = LiveBytes()
        return self._live

    def step(self, lines: Sequence[Mapping[str, Any]], beat: Mapping[str, Any]) -> None:
        """A step ended, on all ranks: a line for each of its iterations; ``beat`` is what the heartbeat says from now
        on."""
        self._record(int(lines[-1]["iteration"]))
        every, now = self._observe.verbose_interval, time()
        for line in lines:
            if every and line["iteration"] % every == 0:
                self._details(line["iteration"])
            line = {"kind": "train", **line, "time": now}
            self._write(line)
            if self._console is not None:
                self._console.iteration(line | {"memory": [resident_bytes()]} | self._of_ranks())
        if self._heart is not None:
            self._heart.tell(lambda known: vars(known).update(beat))

    def _of_ranks(self) -> dict[str, Any]:
        """Per rank the share of its last step that it worked, and its memory, for a terminal: as the page reads them,
        not more often than they are written."""
        if self._console is None or not self._console.is_live or not self._observe.trace:
            return {}
        if time() - self._looked[0] > FRESH:
            run = RunDirectory(self._directory, self._facts)
            rows = [(run.step_summaries(rank, MOST_BYTES) or [{}])[-1] for rank in range(self._facts.num_ranks or 0)]
            busy = [row["busy"] / row["span"] if row.get("span") else None for row in rows]
            held = [(row.get("memory") or {}).get("rss") for row in rows]
            self._looked = time(), {"busy": busy, **({"memory": held} if all(held) else {})}
        return self._looked[1]

    def evaluation(self, line: Mapping[str, Any]) -> None:
        line = {"kind": "evaluation", **line, "time": time()}
        self._write(line)
        if self._console is not None:
            self._console.evaluation(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._journal is not None:
            self._journal.metrics(line)
        for logger in list(self._loggers):
            try:
                logger.log(line)
            except OSError as error:  # its disk is full
                self._loggers.remove(logger)
                self.say(f"warning: {type(logger).__name__}: {error}; the run goes on without it")

    def _record(self, iteration: int) -> None:
        pipeline = self._session.pipeline
        if not self._recorders:
            return
        trace = pipeline.trace()
        if trace.planned is not self._recorded:
            self._recorded, versions = trace.planned, version_table(trace.planned)
            for recorder in self._recorders:
                recorder.versions = versions
        for recorder, rank in zip(self._recorders, pipeline.ranks, strict=True):
            recorder.record(pipeline.step - 1, iteration, trace.records[rank], self._memory(rank))

    def _memory(self, rank: int) -> dict[str, int]:
        """Bytes by what they are for, as far as they are known, and the number of weight versions."""
        pipeline = self._session.pipeline
        found = {"rss": resident_bytes(), **pipeline.weights_of(rank)}
        peak = take_peak(pipeline.devices[pipeline.ranks.index(rank)])
        if peak is not None:  # the device's allocator knows
            held = found["weights"] * max(1, found["versions"]) + found["optimizer"]
            return found | {"peak": peak, "in_step": max(0, peak - held)}
        return found if self._live is None else found | {"in_step": self._live.peak}

    def _details(self, iteration: int) -> None:
        """One line per rank: what its time went to."""
        pipeline = self._session.pipeline
        records = pipeline.trace().records
        mine = [_spent(records[rank]) for rank in pipeline.ranks]
        everyone = mine if pipeline.in_process else pipeline.gather_numbers(mine[0])
        for rank, numbers in enumerate(everyone):
            runs_ahead, waited, *spent = (1000 * number for number in numbers)
            parts = [f"{kind.value} {each:.1f} ms" for kind, each in zip(KINDS, spent, strict=True) if each]
            ahead = f"  host ahead {runs_ahead:.1f} ms" if runs_ahead else ""
            self.say(f"iteration {iteration}  rank {rank}  {'  '.join(parts)}  waiting {waited:.1f} ms{ahead}")

    def finish(self, summary: dict[str, Any], ending: Ending) -> Ending:
        """The run came to an end of its own; with what is kept of it."""
        if self._heart is not None and self._journal is not None:
            ending = ending.at(None, self._heart.beat.saved, self._heart.beat.checkpoint)
            self._journal.summary(summary, ending)
        if self._console is not None:
            self._console.finish(summary | {"ending": asdict(ending), "remedy": ending.remedy(self._directory)})
        return ending

    def close(self) -> None:
        for recorder in self._recorders:
            recorder.close()
            if recorder.problem:
                self.say(f"warning: {recorder.problem}")
        for end in (*self._loggers, self._console):
            with suppress(OSError):
                if end is not None:
                    end.close()
        if self._heart is not None:
            self._heart.stop()


def _spent(records: Sequence[Record]) -> list[float]:
    """Seconds that the host ran ahead of a device at most, that the rank waited, then what it spent on each kind of
    action."""
    spent: dict[Kind, int] = defaultdict(int)
    for record in records:
        spent[record.action.kind] += record.end - record.ready
    waited = sum(record.ready - record.begin for record in records if LANE[record.action.kind] is Lane.COMPUTE)
    return [(run_ahead(records) or 0) / 1e9, waited / 1e9, *(spent[kind] / 1e9 for kind in KINDS)]


def run_facts(session: Session, num_microbatches: int) -> RunFacts:
    """Schedule, program, partition and stages; who trains, and for how long, is for the trainer to add."""
    pipeline, config, skeleton = session.pipeline, session.config, session.skeleton
    program = pipeline.program(num_microbatches)
    written, layout = to_csv(program), pipeline.layout.as_document()
    return RunFacts(
        vpipe=__version__,
        torch=str(torch.__version__),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        schedule=config.parallel.scheduler,
        synchronous=pipeline.synchronous,
        num_ranks=program.num_ranks,
        num_stages=program.num_stages,
        num_microbatches=program.num_microbatches,
        microbatches_per_iteration=config.training.num_microbatches,
        partition=tuple(pipeline.partition),
        program=written,
        versions=str(program.versions),
        placement=program.placement.ranks_of,
        skips=tuple(sorted(program.skips)),
        model=RunModel(
            config.model.name,
            skeleton.num_parameters,
            skeleton.flops_per_token,
            session.model.num_layers,
            session.model.hidden_size,
        ),
        stages=tuple(
            RunStage(
                stage,
                tuple(skeleton.layer_names[begin:end]),
                sum(skeleton.parameters[begin:end]),
                sum(skeleton.weight_bytes[begin:end]),
            )
            for stage, (begin, end) in enumerate(pipeline.layout.bounds)
        ),
        hosts=tuple(seat.host for seat in pipeline.layout.seats),
        cores=num_cores(),
        threads=torch.get_num_threads(),
        layout=layout,
        command=tuple(command()),
        trace=config.observe.trace,
    )


Totals = tuple[float, ...]
"""Iterations, seconds, tokens, samples, FLOPs."""


@dataclass
class Metrics:
    """Adds up iterations."""

    num_devices: int
    precision: str
    warmup_iterations: int
    _all: Totals = (0, 0.0, 0.0, 0.0, 0.0)
    _effective: Totals = (0, 0.0, 0.0, 0.0, 0.0)

    def add(self, seconds: float, tokens: float, samples: float, flops: float = 0.0, counts: bool = True) -> None:
        """One iteration; ``counts`` is false for a profiled one."""
        one = (1, seconds, tokens, samples, flops)
        if counts and self._all[0] >= self.warmup_iterations:
            self._effective = tuple(map(add, self._effective, one))
        self._all = tuple(map(add, self._all, one))

    def summary(self, parameters: int, flops_per_token: float, device: str = CPU) -> dict[str, Any]:
        """OurGPipe's summary of a model on devices of this name; rates are null where every iteration was left out."""
        effective, seconds, tokens, samples, flops = self._effective
        total, total_seconds, total_tokens, _, _ = self._all
        if tokens and flops:
            flops_per_token = flops / tokens
        rate = tokens / seconds if seconds else None
        peak = peak_flops(device, self.precision)
        return {
            "total_time_seconds": total_seconds,
            "effective_time_seconds": seconds,
            "time_per_iteration_seconds": seconds / effective if effective else None,
            "total_iterations": int(total),
            "effective_iterations": int(effective),
            "warmup_iterations": min(self.warmup_iterations, int(total)),
            "total_tokens": round(total_tokens),
            "effective_tokens": round(tokens),
            "throughput_tokens_per_second": rate,
            "samples_per_second": samples / seconds if seconds else None,
            "mfu": rate * flops_per_token / (peak * self.num_devices) if peak and rate is not None else "n/a",
            "model_params": parameters,
            "flops_per_token": flops_per_token,
            "num_gpus": self.num_devices if device != CPU else 0,
            "device_name": device,
            "dtype": self.precision,
        }
