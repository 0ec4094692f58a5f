"""No option lies: every field of a config changes something that can be seen, or is refused in one sentence.

The fields come from the model itself. A new field without a case here fails the first test.
"""

from __future__ import annotations

import fnmatch
import io
import json
import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel
from train_runs import Run, equal, run, tiny

from vpipe.cli import train as cli
from vpipe.compat.priorities.order import Turnstile
from vpipe.config import PipelineConfig
from vpipe.config.checks import idle_keys
from vpipe.config.load import load
from vpipe.config.problems import section_of
from vpipe.errors import UserError
from vpipe.launch import local, machines
from vpipe.launch.job import plan_job
from vpipe.launch.slurm import script
from vpipe.launch.stopping import Grace
from vpipe.observe import dashboard
from vpipe.rundir import claim
from vpipe.rundir.changes import EFFECTS, effect_of
from vpipe.runtime import assembly
from vpipe.runtime.transport.inprocess import InProcessTransport
from vpipe.train import session, worker
from vpipe.train.checkpoints import layer_file
from vpipe.train.feed import Feed


def leaves(model: type[BaseModel], path: str = "") -> list[str]:
    """Every field that is not a section."""
    found: list[str] = []
    for name, info in model.model_fields.items():
        inner = section_of(info)
        found += leaves(inner, f"{path}{name}.") if inner is not None else [f"{path}{name}"]
    return found


class Bench:
    """Looks at what a config does."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tmp_path, self.patch, self.count = tmp_path, monkeypatch, 0
        folder = tmp_path / "text"
        folder.mkdir()
        for number in range(40):
            (folder / f"{number}.txt").write_text(f"a text of {number} words and {number * 7} letters. " * 8)
        other = tmp_path / "other"
        other.mkdir()
        for number in range(40):
            (other / f"{number}.txt").write_text(f"quite another text {number}, longer than the first one. " * 8)

    def place(self) -> Path:
        self.count += 1
        return self.tmp_path / f"run{self.count}"

    def run(self, config: dict[str, Any]) -> Run:
        return run(config, self.place())


See = Callable[[Bench, dict[str, Any]], Any]


def learned(bench: Bench, config: dict[str, Any]) -> Any:
    """Losses and weights."""
    found = bench.run(config)
    return found.losses, {name: weight.sum().item() for name, weight in found.weights.items()}


def rates(bench: Bench, config: dict[str, Any]) -> Any:
    return [line["learning_rate"] for line in bench.run(config).lines]


def iterations(bench: Bench, config: dict[str, Any]) -> Any:
    found = bench.run(config)
    return found.trainer.iteration, [line["update"] for line in found.lines]


def evaluations(bench: Bench, config: dict[str, Any]) -> Any:
    return [(line["iteration"], line["loss"]) for line in bench.run(config).metrics if line["kind"] == "evaluation"]


def scales(bench: Bench, config: dict[str, Any]) -> Any:
    return [line["loss_scale"] for line in bench.run(config).lines]


def norms(bench: Bench, config: dict[str, Any]) -> Any:
    return list(bench.run(config).lines[-1].get("gradient_norms", {}))


def program(bench: Bench, config: dict[str, Any]) -> Any:
    facts = json.loads((bench.run(config).directory / "run.json").read_text())
    return [facts[key] for key in ("program", "placement", "partition", "versions", "num_ranks")]


def files(bench: Bench, config: dict[str, Any]) -> Any:
    """Names without the numbers of processes and times."""
    directory = bench.run(config).directory
    return sorted({re.sub(r"\d{4,}.*", "", str(p.relative_to(directory))) for p in directory.rglob("*") if p.is_file()})


def said(bench: Bench, config: dict[str, Any]) -> Any:
    """What was printed, numbers left out."""
    return re.sub(r"[\d.]+|/\S+", "#", bench.run(config).said)


def page(bench: Bench, config: dict[str, Any]) -> Any:
    """What is said of the live page."""
    place = bench.place()
    place.mkdir()
    with (
        redirect_stdout(io.StringIO()) as told,
        dashboard.served(PipelineConfig.from_dict(config), place, False),
    ):
        return told.getvalue()


def summary(bench: Bench, config: dict[str, Any]) -> Any:
    return bench.run(config).summary["effective_iterations"]


def checkpoints(bench: Bench, config: dict[str, Any]) -> Any:
    found = bench.run(config)
    where = found.trainer.checkpoints.directory
    names = sorted(path.name for path in where.glob("iteration-*"))
    return names, where.relative_to(bench.tmp_path / found.directory.name) if names and where.name != "kept" else where


def saved_by(bench: Bench, config: dict[str, Any]) -> Any:
    """Which threads write checkpoints."""
    threads: set[str] = set()
    write = layer_file.write

    def noted(*args: Any) -> Any:
        threads.add(threading.current_thread().name)
        return write(*args)

    bench.patch.setattr(layer_file, "write", noted)
    bench.run(config)
    return threads


def with_other_data(bench: Bench, config: dict[str, Any]) -> Any:
    """Whether a run goes on with other data."""
    first = bench.run(config | {"checkpoint": {"interval": 1}})
    other = config | {"dataset": config["dataset"] | {"split_seed": 5}}
    try:
        return bool(run(other, bench.place(), resume=first.directory))
    except UserError as error:
        return error.sentence.partition(": ")[0]


def sent(bench: Bench, config: dict[str, Any]) -> Any:
    """How often rank 0 has told the others what it has read."""
    calls: list[str] = []
    bench.patch.setattr(assembly, "told_by_leader", lambda transport, value: calls.append("told") or value)
    bench.run(config)
    return len(calls)


def readers(bench: Bench, config: dict[str, Any]) -> Any:
    """How many processes read batches ahead."""
    counts: set[int] = set()
    read = Feed.read

    def watched(self: Feed, positions: Any) -> Any:
        units = read(self, positions)
        counts.add(len(multiprocessing.active_children()))
        return units

    bench.patch.setattr(Feed, "read", watched)
    bench.run(config)
    bench.patch.setattr(Feed, "read", read)
    return counts


def held_out(bench: Bench, config: dict[str, Any]) -> Any:
    valid = session.load_data(PipelineConfig.from_dict(config)).valid
    return 0 if valid is None else len(valid)


def reductions(bench: Bench, config: dict[str, Any]) -> Any:
    """How replicas add up."""
    calls: set[str] = set()
    original = InProcessTransport.all_reduce

    def watched(self: Any, *args: Any) -> Any:
        calls.add("all_reduce")
        return original(self, *args)

    bench.patch.setattr(InProcessTransport, "all_reduce", watched)
    bench.run(config)
    bench.patch.setattr(InProcessTransport, "all_reduce", original)
    return calls


def turns(bench: Bench, config: dict[str, Any]) -> Any:
    """How often somebody waited for a turn, and by which policy."""
    seen: set[Any] = set()
    original = Turnstile.turn

    def watched(self: Turnstile, action: Any) -> Any:
        seen.add(self._policy)
        return original(self, action)

    bench.patch.setattr(Turnstile, "turn", watched)
    bench.run(config)
    bench.patch.setattr(Turnstile, "turn", original)
    return seen


def patience(bench: Bench, config: dict[str, Any]) -> Any:
    """What the pipeline, and with it the transport and the watchdog, is told."""
    told: list[Any] = []
    original = session.Pipeline

    def watched(*args: Any, **options: Any) -> Any:
        told.append(options["timeout"])
        return original(*args, **options)

    bench.patch.setattr(session, "Pipeline", watched)
    session.open_session(PipelineConfig.from_dict(config))
    bench.patch.setattr(session, "Pipeline", original)
    return told


def launched(bench: Bench, config: dict[str, Any]) -> Any:
    """What ``vpipe train`` starts: threads here, local processes, ssh or a container."""
    started: list[Any] = []

    class Became(Exception):
        """The process would be another now."""

    def note(what: str) -> Callable[..., int]:
        def call(*args: Any, **options: Any) -> int:
            options.pop("arguments", None)
            options.pop("log_dir", None)
            options.pop("concluded", None)
            if isinstance(options.get("grace"), Grace):
                options["grace"] = options["grace"].first()
            started.append((what, repr(args), sorted(options.items(), key=str) if what != "worker" else None))
            if what == "container":
                raise Became
            return 0

        return call

    for place, name, what in (
        (local, "run", "local"),
        (machines, "run", "machines"),
        (worker, "run", "worker"),
        (cli.os, "execvpe", "container"),
    ):
        bench.patch.setattr(place, name, note(what))
    with suppress(Became):
        cli.run(PipelineConfig.from_dict(config), None, (), bench.place(), None)
    bench.patch.undo()
    return re.sub(
        r"run\d+", "run", str([(what, args if what != "worker" else "", options) for what, args, options in started])
    )


def threads(bench: Bench, config: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    worker.train(config, directory=str(bench.place()))
    return torch.get_num_threads()


def run_directory(bench: Bench, config: dict[str, Any]) -> Any:
    bench.patch.chdir(bench.tmp_path)
    chosen = PipelineConfig.from_dict(config)
    return claim.take(chosen, chosen.to_yaml(), None).directory.parent


def opened_to(bench: Bench, config: dict[str, Any]) -> Any:
    """Who may read the run directories."""
    before = os.umask(0o027)
    try:
        bench.patch.chdir(bench.tmp_path)
        chosen = PipelineConfig.from_dict(config)
        made = [claim.take(chosen, chosen.to_yaml(), where).directory for where in (None, bench.place())]
    finally:
        os.umask(before)
    return [oct(each.stat().st_mode & 0o777) for each in made]


def resumed(bench: Bench, config: dict[str, Any]) -> Any:
    """Where ``vpipe train`` begins."""
    before = bench.tmp_path / "before"
    if not before.exists():
        run(tiny({"checkpoint.interval": 2, "training.max_iterations": 2}), before)
    file = bench.tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config).replace("BEFORE", str(before)))
    given: list[Any] = []
    bench.patch.setattr(worker, "run", lambda config, **arguments: given.append(arguments["resume"]) or 0)
    cli.command.main([str(file), "--output-dir", str(bench.place())], standalone_mode=False)
    return given


def submitted(bench: Bench, config: dict[str, Any]) -> Any:
    file = bench.tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return script(plan_job(str(file), (), (), None, {})[0])


def answer(see: See, bench: Bench, config: dict[str, Any]) -> Any:
    """What is seen, or the one sentence in which it is refused."""
    try:
        return see(bench, config)
    except UserError as error:
        sentence = str(error)
    assert len(sentence.splitlines()) == 1
    return f"refused: {sentence}"


PLAIN: dict[str, Any] = {}
"""What was seen without the change, for the fields that share it."""


@dataclass(frozen=True)
class Case:
    """A value that differs from the default, where it can be seen, and in what company."""

    see: See
    value: Any
    company: Mapping[str, Any] = field(default_factory=dict)
    contains: str = ""
    """What the answer to the changed value must hold."""
    slow: bool = False


SHORT = {"training.max_iterations": 2}
TEXT = {
    "dataset": {"name": "text", "path": "TMP/text", "batch_size": 8, "extra": {"tokenizer": "char"}},
    "training.max_iterations": 2,
}
SGD = {"training.optimizer": "sgd"}
NAN = {"training.optimizer": "sgd", "training.learning_rate": 1e6}
POLY = {"training.learning_rate_policy": "polynomial"}
STEP = {"training.learning_rate_policy": "step", "training.learning_rate_steps": [2.0]}
PIPEDREAM = {"parallel.scheduler": "pipedream"}
PROCESSES = {"parallel.transport": "auto"}
ELASTIC = PROCESSES | {"parallel.scheduler": "1f1b", "parallel.device": "cpu"}
DOCKER = {"launch.container.kind": "docker", "launch.container.image": "vpipe"}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 32}
HUGGING = {"model": {"name": "huggingface", "sequence_length": 8, "config": GPT2}, "training.max_iterations": 1}
TRANSLATION = {
    "model.name": "translation",
    "dataset.extra": {"kind": "translation", "vocab_size": 32, "num_examples": 64},
    "training.max_iterations": 1,
}

CASES: dict[str, Case] = {
    "plugins": Case(learned, ["no_such_module_of_ours"], SHORT, contains="neither a Python file"),
    "model.name": Case(learned, "llama", SHORT),
    "model.hidden_size": Case(learned, 32, SHORT),
    "model.num_layers": Case(learned, 3, SHORT),
    "model.num_heads": Case(learned, 4, SHORT),
    "model.sequence_length": Case(learned, 4, SHORT),
    "model.vocab_size": Case(learned, 64, SHORT),
    "model.config": Case(learned, GPT2 | {"n_layer": 2}, HUGGING, slow=True),
    "model.directory": Case(learned, "TMP/hub", HUGGING, slow=True),
    "model.compile": Case(learned, True, SHORT | {"parallel.scheduler": "zb-h1"}, "refused: model.compile"),
    "model.split_head": Case(learned, True, SHORT),
    "model.extra": Case(learned, {"dropout": 0.5}, SHORT),
    "dataset.name": Case(learned, "synthetic", TEXT | {"dataset.extra": {}}),
    "dataset.path": Case(learned, "TMP/other", TEXT),
    "dataset.batch_size": Case(learned, 4, SHORT),
    "dataset.max_tokens": Case(learned, 16, TRANSLATION),
    "dataset.num_workers": Case(readers, 2, SHORT),
    "dataset.test_size": Case(held_out, 0.4, TEXT),
    "dataset.split_seed": Case(learned, 1, SHORT),
    "dataset.may_differ": Case(with_other_data, True, SHORT),
    "dataset.read_by": Case(sent, "one", SHORT),
    "dataset.extra": Case(learned, {"vocab_size": 40}, SHORT),
    "training.learning_rate": Case(learned, 0.1, SHORT),
    "training.epochs": Case(iterations, 1),
    "training.num_microbatches": Case(program, 2, SHORT),
    "training.gradient_accumulation": Case(iterations, 2, SHORT),
    "training.max_iterations": Case(iterations, 3),
    "training.profile_iteration": Case(files, 1, SHORT, "profiler_1f1b/rank0"),
    "training.exit_after_profile": Case(
        iterations, True, {"training.profile_iteration": 0, "training.max_iterations": 2}
    ),
    "training.seed": Case(learned, 1, SHORT),
    "training.optimizer": Case(learned, "lamb", SHORT),
    "training.optimizer_options": Case(learned, {"amsgrad": True, "eps": 0.1}, SHORT),
    "training.parameter_groups": Case(learned, [{"match": "vectors", "learning_rate": 0.0}], SHORT),
    "training.ema": Case(evaluations, 0.5, {"training.evaluation_interval": 0, "training.epochs": 1}),
    "training.patience": Case(iterations, 1, {"checkpoint.best": "train.gradient_norm", "checkpoint.interval": 1}),
    "training.weight_decay": Case(learned, 0.5, SHORT),
    "training.learning_rate_policy": Case(rates, "linear"),
    "training.warmup": Case(rates, 4.0),
    "training.learning_rate_degree": Case(rates, 2.0, POLY),
    "training.learning_rate_steps": Case(rates, [4.0], STEP),
    "training.learning_rate_factor": Case(rates, 0.5, STEP),
    "training.minimum_learning_rate": Case(rates, 0.005, {"training.learning_rate_policy": "linear"}),
    "training.gradient_clipping": Case(learned, 0.01, SGD | SHORT),
    "training.precision": Case(learned, "bf16", SHORT),
    "training.loss_scale": Case(scales, 64.0, SHORT | {"training.precision": "fp16"}),
    "training.on_nan": Case(iterations, "skip", NAN),
    "training.nan_limit": Case(iterations, 2, NAN),
    "training.evaluation_interval": Case(evaluations, 3, {"training.evaluation_interval": 0, "training.epochs": 1}),
    "training.evaluation_batches": Case(evaluations, 1, {"training.evaluation_interval": 0, "training.epochs": 1}),
    "parallel.scheduler": Case(program, "zb-h1", SHORT),
    "parallel.model_parallel_size": Case(program, 3, SHORT),
    "parallel.data_parallel_size": Case(program, 2, SHORT),
    "parallel.replicas": Case(program, [1, 2], PIPEDREAM | SHORT),
    "parallel.stages_per_rank": Case(program, 1, SHORT | {"parallel.scheduler": "looped-bfs"}),
    "parallel.partition": Case(program, [3, 1], SHORT),
    "parallel.recompute": Case(program, 1.0, SHORT, "0R0"),
    "parallel.swap": Case(program, 1.0, SHORT | {"parallel.scheduler": "gpipe"}, "0OUT0"),
    "parallel.adapt": Case(
        learned, "suggest", SHORT, "refused: parallel.adapt measures stages, but ranks that are thre"
    ),
    "parallel.memory": Case(
        lambda _, config: idle_keys(PipelineConfig.from_dict(config)), "1GiB", {}, "parallel.memory has no effect"
    ),
    "parallel.schedule_options": Case(program, {"update_interval": 2}, PIPEDREAM | SHORT),
    "parallel.transport": Case(launched, "auto", {}, "local"),
    "parallel.backend": Case(learned, "nccl", SHORT, "refused: parallel.backend is nccl"),
    "parallel.device": Case(learned, "cuda", SHORT, "refused: the device 'cuda' is not on this machine"),
    "parallel.timeout": Case(patience, 7.0, {}, "7.0"),
    "parallel.exact_reduction": Case(reductions, False, SHORT | {"parallel.data_parallel_size": 2}, "all_reduce"),
    "parallel.priority": Case(turns, "fifo", SHORT, "fifo"),
    "parallel.use_orion_scheduler": Case(learned, True, SHORT, "refused: Orion is asked for, but its library"),
    "checkpoint.directory": Case(checkpoints, "TMP/kept", SHORT | {"checkpoint.interval": 2}, "kept"),
    "checkpoint.interval": Case(checkpoints, 2, SHORT, "iteration-000002"),
    "checkpoint.best": Case(checkpoints, "evaluation.loss", SHORT | {"training.evaluation_interval": 1}, "iteration-"),
    "checkpoint.blocking": Case(saved_by, True, SHORT | {"checkpoint.interval": 1}, "MainThread"),
    "checkpoint.keep": Case(checkpoints, 1, SHORT | {"checkpoint.interval": 1}, "iteration-000002"),
    "checkpoint.resume": Case(resumed, "BEFORE", {}, "before"),
    "observe.directory": Case(run_directory, "elsewhere", {}, "elsewhere"),
    "observe.private": Case(opened_to, False, {}, "['0o750', '0o750']"),
    "observe.log_interval": Case(said, 3, SHORT),
    "observe.verbose_interval": Case(said, 2, SHORT, "waiting"),
    "observe.line_format": Case(said, "vpipe-line", SHORT, "Epoch: [#]"),
    "observe.warmup_iterations": Case(summary, 1, SHORT),
    "observe.trace": Case(files, True, SHORT, "events/rank1.jsonl"),
    "observe.gradient_norms": Case(norms, True, SHORT, "0 "),
    "observe.tensorboard": Case(files, True, SHORT, "tensorboard/"),
    "observe.wandb": Case(files, True, SHORT, "wandb/"),
    "observe.dashboard": Case(page, True, {}, "live page: its address is in "),
    "launch.machines": Case(launched, ["node1:0", "node2:0"], PROCESSES, "node2:0"),
    "launch.through": Case(
        launched, "srun", ELASTIC | {"launch.elastic": "2:2"}, "refused: launch.through is srun, but this process is in"
    ),
    "launch.container.kind": Case(launched, "apptainer", PROCESSES | DOCKER, "apptainer"),
    "launch.container.image": Case(launched, "another", PROCESSES | DOCKER, "another"),
    "launch.container.binds": Case(launched, ["/data"], PROCESSES | DOCKER, "/data"),
    "launch.slurm.nodes": Case(submitted, 2, {}, "--nodes=2"),
    "launch.slurm.ntasks_per_node": Case(submitted, 1, {}, "refused: --nodes 1 x ntasks_per_node 1"),
    "launch.slurm.options": Case(submitted, {"partition": "gpu", "mem": "8G"}, {}, "--mem=8G\n#SBATCH --partition=gpu"),
    "launch.slurm.requeue": Case(submitted, False, {}, "--no-requeue"),
    "launch.threads": Case(threads, 2, SHORT, "2"),
    "launch.grace": Case(launched, 123.0, PROCESSES, "123.0"),
    "launch.elastic": Case(launched, "2:2", ELASTIC, "least=2, most=2"),
    "checkpoint.on_exit": Case(launched, False, ELASTIC | {"launch.elastic": "2:2"}, "saves=False"),
    "launch.on_loss": Case(launched, "shrink", ELASTIC | {"launch.elastic": "2:2"}, "replaces=False"),
    "launch.interface": Case(launched, "eth7", PROCESSES, "eth7"),
    "launch.master_port": Case(launched, 23456, PROCESSES, "23456"),
}


def test_every_field_has_a_case() -> None:
    assert sorted(CASES) == sorted(leaves(PipelineConfig))


SAID_ALONE = {
    "dataset.path": "TMP/other",
    "dataset.test_size": 0.4,
    "training.learning_rate_degree": 2.0,
    "training.learning_rate_steps": [0.4],
    "training.learning_rate_factor": 0.5,
    "training.minimum_learning_rate": 0.005,
    "training.loss_scale": 64.0,
    "training.exit_after_profile": True,
    "training.profile_iteration": 90,
    "training.warmup": 90.0,
    "training.evaluation_batches": 1,
    "training.patience": 2,
    "training.optimizer_options": {"lr": 0.5},
    "parallel.exact_reduction": False,
    "parallel.memory": "1GiB",
    "checkpoint.best": "evaluation.loss",
    "checkpoint.keep": 3,
    "checkpoint.blocking": True,
    "checkpoint.on_exit": False,
    "launch.on_loss": "shrink",
    "launch.through": "srun",
    "launch.container.image": "another",
    "launch.container.binds": ["/data"],
}
"""Keys that a plain run does not read."""


@pytest.mark.parametrize("name", SAID_ALONE)
def test_a_key_that_is_not_read_is_told(name: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    value = json.loads(json.dumps(SAID_ALONE[name]).replace("TMP", str(tmp_path)))
    file.write_text(yaml.safe_dump(tiny(SHORT | {name: value})))
    try:
        loaded = load(file)
        made = run(loaded.config.to_dict(), tmp_path / "run")
        told = " ".join([*loaded.warnings, *(line for line in made.said.splitlines() if "warning: " in line)])
    except UserError as error:
        told = str(error)
    assert name in told or name.rpartition(".")[2] in told, told


def test_every_field_with_company_is_told_alone() -> None:
    """A field that needs more than a short run to be seen does nothing without it: then a sentence says so."""
    shared = {"training.max_iterations", "training.evaluation_interval", "training.epochs", "checkpoint.interval"}
    seen_alone = {
        *("training.gradient_clipping", "model.config", "model.directory", "model.name", "dataset.name"),
        "dataset.split_seed",
        *("dataset.max_tokens", "parallel.replicas", "parallel.stages_per_rank", "parallel.swap"),
        *("parallel.schedule_options", "model.compile", "training.on_nan", "training.nan_limit"),
    }
    lonely = {
        name
        for name, case in CASES.items()
        if case.company.keys() - shared and not name.startswith("launch.") and case.company != PROCESSES
    }
    assert lonely - seen_alone <= SAID_ALONE.keys()


def test_every_field_says_what_another_value_does_to_a_resumed_run() -> None:
    assert all(effect_of(name) is not None for name in leaves(PipelineConfig))
    assert not [row for row in EFFECTS if not fnmatch.filter(leaves(PipelineConfig), row)]


@pytest.mark.rotates(20)
@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if name.split(".")[0] not in ("launch", "plugins") and not case.slow]
)
def test_another_value_in_a_resumed_run_is_said_or_refused_or_changes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    Bench(tmp_path, monkeypatch)
    made = [dict(case.company) | {"checkpoint.interval": 2, "training.max_iterations": most} for most in (2, 4)]
    first, same = (tiny(json.loads(json.dumps(each).replace("TMP", str(tmp_path)))) for each in made)
    other = tiny(json.loads(json.dumps(made[1] | {name: case.value}).replace("TMP", str(tmp_path))))
    run(first, tmp_path / "first")
    plain = run(same, tmp_path / "plain", tmp_path / "first")
    try:
        changed = Run(other, tmp_path / "changed", tmp_path / "first")
    except UserError:
        return
    said = next((line for line in changed.said.splitlines() if "not as in the run that it goes on from" in line), "")
    if name not in said:
        changed.train()
        assert changed.trainer.iteration == (3 if name == "training.max_iterations" else 4)
        shorter = name == "training.max_iterations"
        assert shorter or equal(plain.weights, changed.weights), f"{name} is not said, but changes the weights"


@pytest.mark.rotates(60)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if case.slow else ()) for name, case in CASES.items()]
)
def test_the_field_does_something(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    bench = Bench(tmp_path, monkeypatch)

    def located(values: Any) -> Any:
        return json.loads(json.dumps(values).replace("TMP", str(tmp_path)))

    if name == "model.directory":
        from transformers import AutoConfig, GPT2LMHeadModel

        GPT2LMHeadModel(AutoConfig.for_model(**GPT2)).save_pretrained(tmp_path / "hub")
    company = tiny(located(dict(case.company)))
    key = f"{case.see.__name__} {company}"
    if key not in PLAIN:
        PLAIN[key] = answer(case.see, bench, company)
    plain = PLAIN[key]
    changed = answer(case.see, bench, tiny(located({**case.company, name: case.value})))
    assert not str(plain).startswith("refused"), plain
    assert changed != plain
    assert case.contains in str(changed)
