"""``vpipe plan``: which layers where, what to keep, recompute or swap, under which schedule, and how long it takes."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from vpipe import config as configs
from vpipe.cli import completion, loading
from vpipe.cli.bar import bar
from vpipe.cli.choice import COUNT
from vpipe.cli.options import plugin_option, set_option, with_plugins
from vpipe.cli.ranks import AUTO, Replicas, read_links
from vpipe.cli.timing import Numbers
from vpipe.errors import UserError
from vpipe.registry import FORM_REGISTRY, load_plugins

if TYPE_CHECKING:
    from vpipe.plan.costs import Profile
    from vpipe.plan.planner import Plan

FREE = "free"


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for; ``None`` leaves it to the config."""

    target: Path
    ranks: int | None
    microbatches: str | None
    batch: int | None
    memory: str | None
    speeds: list[float] | None
    scheduler: str
    stages_per_rank: int | None
    recompute: bool
    swap: bool
    profile: Path | None
    overrides: tuple[str, ...]
    replicas: int | tuple[int, ...] | Literal["auto"] | None
    links: Path | None
    order: str
    asynchronous: bool
    effort: float
    time_limit: float | None

    @property
    def machine(self) -> str:
        """The options that describe another machine than this one, as far as they are given."""
        given = (("--speeds", self.speeds), ("--links", self.links), ("--order free", self.order == FREE))
        return " and ".join(name for name, value in given if value)


@click.command("plan")
@click.argument("target", type=click.Path(path_type=Path), metavar="CONFIG|PROFILE.json|GRAPH.txt")
@click.option("-p", "--ranks", type=COUNT, help="Number of ranks. [the config's]")
@click.option("-m", "--microbatches", metavar="N|free", help="Units of a batch; free finds the best. [the config's]")
@click.option("--batch", type=COUNT, help="Rows of a batch, cut into -m units. [the config's]")
@click.option(
    "--memory",
    metavar="SIZE[,SIZE…]",
    help="What a rank has, such as 4GiB; one for all or one for each. A device: its own.",
)
@click.option("--speeds", type=Numbers(), help="Relative speed of each rank, such as 1,1,0.5,1. [all alike]")
@click.option(
    "--scheduler",
    shell_complete=completion.schedules,
    default="auto",
    show_default=True,
    help="A schedule, or auto: try all synchronous ones.",
)
@click.option("-v", "--stages-per-rank", type=COUNT, help="Where the schedule lets you choose.")
@click.option("--recompute/--no-recompute", default=True, help="May activations be computed again? [yes]")
@click.option("--swap/--no-swap", default=True, help="May activations leave the device? [yes]")
@click.option("--profile", type=click.Path(path_type=Path), help="The profile of the config's model. [measured now]")
@set_option
@plugin_option
@click.option("--replicas", type=Replicas(), help="Copies of every stage; auto divides the -p ranks. [the config's]")
@click.option("--links", type=click.Path(path_type=Path), help="JSON: latency and bandwidth between ranks. [profile's]")
@click.option(
    "--order", type=click.Choice(["given", FREE]), default="given", show_default=True, help="Of unequal ranks."
)
@click.option("--asynchronous", is_flag=True, help="Let auto choose asynchronous schedules too (stale weights).")
@click.option("--effort", type=click.FloatRange(0.01, 1000), default=1.0, show_default=True, help="Of the search.")
@click.option("--time-limit", type=click.FloatRange(0.01), metavar="SECONDS", help="Answer with what is found by then.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the plan as JSON.")
@click.option("--vpipe", "old_form", type=click.Path(path_type=Path, dir_okay=False), help="Write it in VPipe's form.")
@click.option(
    "--against",
    metavar="WAY[,WAY…]",
    help="Lay other ways beside the plan: ddp, fsdp, single. Should this model be pipelined at all?",
)
@click.option("--check", is_flag=True, help="Run a few steps and lay what was measured beside what was predicted.")
@click.option("--json", "as_json", is_flag=True, help="JSON and nothing else.")
def command(
    output: Path | None, old_form: Path | None, check: bool, against: str | None, as_json: bool, **given: Any
) -> int:
    """The best partition, recompute and swap choices and schedule for a model, with a proof of how good they are.

    A CONFIG is profiled first, unless --profile names what 'vpipe profile' has written. Exit code 1: nothing fits.

    \b
    Examples:
      vpipe plan configs/default.yaml --memory 512MiB -o plan.json
      vpipe plan profile.json -p 4 -m 8 --memory 4GiB --scheduler 1f1b
      vpipe plan profile.json -p 4 -m 8 --against ddp,fsdp,single
      vpipe plan graph.txt -p 8 -m 16 --speeds 1,1,1,1,0.5,0.5,1,1
    """
    from vpipe.cli import plan_check
    from vpipe.cli.profiling import refuse_lost

    wanted = _wanted(**given)
    if against is not None:
        from vpipe.plan.against import check_names

        check_names(_names(against))
    refuse_lost(output, old_form, read=(wanted.target, wanted.profile, wanted.links))
    config = _config(wanted)
    if check:
        _refuse_check(wanted, config)
    profile = _profile(wanted, config, quiet=as_json)
    if isinstance(profile, int):
        return profile
    if check and profile.links is not None:
        raise UserError(
            f"--check runs on this machine, but the profile has the links between {profile.links.num_ranks} ranks as a "
            "launcher started them; leave --check out, or measure here with 'vpipe profile'"
        )
    profile, found = _found(profile, wanted, config, quiet=as_json)
    if output is not None:
        found.save(output)
    others, words = _against(against, found, profile, wanted) if against is not None else ({}, "")
    notes = _write_old(found, profile, wanted, old_form) if old_form is not None else []
    checked = plan_check.compare(found, config, quiet=as_json) if check and config is not None else None
    if isinstance(checked, int):
        return checked
    if as_json:
        click.echo(json.dumps(found.to_json() | others | ({"check": checked} if checked else {})))
        return 0
    parts = [f"{profile.model or wanted.target}\n{found.table()}", words, "\n".join(f"{old_form}: {n}" for n in notes)]
    if checked is not None:
        parts.append(plan_check.table(checked))
    parts.append(f"run it: {_command(found, wanted, config, output)}")
    click.echo("\n\n".join(part for part in parts if part))
    return 0


def _names(against: str) -> list[str]:
    return [name.strip() for name in against.split(",")]


def _refuse_check(wanted: Wanted, config: configs.PipelineConfig | None) -> None:
    """What cannot be trained here cannot be checked."""
    if config is None:
        raise UserError(f"--check trains a few steps, for which {wanted.target} is not enough; plan a config")
    if wanted.machine:
        raise UserError(f"--check runs on this machine, whose ranks are alike; leave {wanted.machine} or --check out")


def _found(
    profile: Profile, wanted: Wanted, config: configs.PipelineConfig | None, quiet: bool
) -> tuple[Profile, Plan]:
    """The plan, and the profile that it is a plan of: a graph with branches has several."""
    if wanted.target.suffix != ".txt":
        return profile, make(profile, wanted, config, quiet=quiet)
    stages = (wanted.ranks or 1) * (wanted.stages_per_rank or 1)
    each = replace(wanted, time_limit=wanted.time_limit / 2) if wanted.time_limit else wanted  # of two orders
    fastest = max(wanted.speeds or [1.0])
    made: tuple[Profile, Plan] = FORM_REGISTRY.create(
        "graph plan", wanted.target, stages, lambda one: make(one, each, quiet=quiet), fastest
    )
    return made


def _wanted(plugins: tuple[str, ...], **given: Any) -> Wanted:
    """Hand plugins on with the config; beside a profile they bring a schedule, and are loaded here."""
    if given["target"].suffix in (".json", ".txt"):
        load_plugins(plugins)
    else:
        given["overrides"] = with_plugins(given["overrides"], plugins)
    return Wanted(**given)


def _config(wanted: Wanted) -> configs.PipelineConfig | None:
    """The config, where the target is one."""
    if wanted.target.suffix in (".json", ".txt"):
        for flag, value in (("--profile", wanted.profile), ("--set", wanted.overrides)):
            if value:
                raise UserError(f"{flag} goes with a config; {wanted.target} is a profile already, so leave it out")
        return None
    return loading.load(wanted.target, wanted.overrides).config


def _profile(wanted: Wanted, config: configs.PipelineConfig | None, quiet: bool) -> Profile | int:
    from vpipe.plan.costs import load_profile

    if config is None:
        read = FORM_REGISTRY.get("graph profile") if wanted.target.suffix == ".txt" else load_profile
        profile: Profile = read(wanted.target)
        return profile
    if wanted.profile is None:
        from vpipe.cli.profiling import ROUNDS, measure

        return measure(config, ROUNDS, wanted.target, wanted.overrides, quiet)
    found = load_profile(wanted.profile)
    from vpipe.train.measure.profile import identity_of

    loading.refuse(config, parallel=False)
    model = identity_of(config)
    if found.model != model:
        raise UserError(
            f"{wanted.profile} is a profile of {found.model or 'an unnamed model'!r}, but {wanted.target} trains "
            f"{model!r}; measure it with 'vpipe profile {wanted.target} -o {wanted.profile}'"
        )
    return found


def make(profile: Profile, wanted: Wanted, config: configs.PipelineConfig | None = None, quiet: bool = True) -> Plan:
    """The plan that the command line and the config ask for."""
    from vpipe.plan.planner import plan

    ranks = wanted.ranks or (config.parallel.model_parallel_size if config else None)
    if ranks is None:
        raise UserError(f"a plan of {wanted.target} needs the number of ranks: add -p N")
    if wanted.scheduler == "auto" and wanted.stages_per_rank is not None:
        raise UserError("-v goes with a named schedule; add --scheduler NAME, or leave -v out")
    batch = wanted.batch or (config.dataset.batch_size if config and config.dataset.max_tokens is None else None)
    own = profile.device.get("memory_bytes")  # a device has so much; a process on the host may take what it gets
    memory = wanted.memory.split(",") if wanted.memory else [str(int(own))] if own else None
    replicas = _replicas(wanted, config, ranks)
    total = ranks if replicas == AUTO else ranks * replicas if isinstance(replicas, int) else sum(replicas)
    with bar("planning", hidden=quiet) as tell:
        return plan(
            profile,
            ranks,
            num_microbatches=_counts(wanted, config, batch),
            memory=memory[0] if memory and len(memory) == 1 else memory,
            schedule=wanted.scheduler,
            stages_per_rank=wanted.stages_per_rank,
            speed=wanted.speeds or 1.0,
            recompute=wanted.recompute,
            swap=wanted.swap,
            batch_rows=batch,
            modes=("bsp", "asp") if wanted.asynchronous else ("bsp",),
            replicas=replicas,
            free_order=wanted.order == FREE,
            effort=wanted.effort,
            time_limit=wanted.time_limit,
            tell=tell,
            links=read_links(wanted.links, total) if wanted.links else None,
        )


def _replicas(
    wanted: Wanted, config: configs.PipelineConfig | None, ranks: int
) -> int | tuple[int, ...] | Literal["auto"]:
    """The command line's, else the config's, if it has as many stages."""
    if wanted.replicas is not None or config is None:
        return wanted.replicas or 1
    own = config.parallel.replicas
    return own if own is not None and len(own) == ranks else config.parallel.data_parallel_size


def _counts(wanted: Wanted, config: configs.PipelineConfig | None, batch: int | None) -> int | list[int]:
    """How many units a batch may be cut into."""
    text = wanted.microbatches
    if text is None:
        if config is None:
            raise UserError(f"a plan of {wanted.target} needs the number of microbatches: add -m N, or -m free")
        return config.training.num_microbatches
    if text != FREE:
        if not text.isascii() or not text.isdigit() or len(text) > 15 or int(text) < 1:
            raise UserError(f"-m is {text[:40]!r}; give a whole number of at least 1, or 'free'")
        return int(text)
    if batch is None:
        raise UserError("-m free asks how to cut a batch, so it needs the rows of one: add --batch N")
    low = [count for count in range(1, isqrt(batch) + 1) if batch % count == 0]
    return sorted({*low, *(batch // count for count in low)})


def _against(names: str, found: Plan, profile: Profile, wanted: Wanted) -> tuple[dict[str, Any], str]:
    """Other ways to train the plan's rows on the plan's ranks, for machines and for people."""
    from vpipe.plan import against
    from vpipe.plan.machine import Machine, links_between

    given = read_links(wanted.links, found.total_ranks) if wanted.links else None
    links = links_between(found.total_ranks, profile, given)
    machine = Machine.of(found.total_ranks, found.memory, wanted.speeds or 1.0, links)
    one = profile.scaled(found.microbatch_rows)
    ways = against.compare(_names(names), one, machine, found.rows // one.microbatch_rows)
    told = {"against": [asdict(way) for way in ways], "verdict": against.verdict(ways, found.step_time)}
    return told, against.table(ways, found.step_time, min(found.memory))


def _write_old(found: Plan, profile: Profile, wanted: Wanted, path: Path) -> list[str]:
    from vpipe.plan.costs import write_text
    from vpipe.plan.predict import Machine, Pipe, stage_facts

    pipe = Pipe.of(found.schedule, found.num_ranks, found.num_microbatches, found.stages_per_rank, found.replicas)
    machine = Machine.of(found.total_ranks, found.memory, wanted.speeds or 1.0)
    facts = stage_facts(pipe.program, machine, 1.0 / found.stages_per_rank)
    content, notes = FORM_REGISTRY.create("plan file", found.layout, profile.scaled(found.microbatch_rows), facts)
    write_text(path, json.dumps(content) + "\n")
    return list(notes)


def _command(found: Plan, wanted: Wanted, config: configs.PipelineConfig | None, output: Path | None) -> str:
    """What to type next."""
    if output is None:
        return "add -o plan.json, then train with it"
    name = str(wanted.target) if config is not None else "CONFIG"
    words = ["vpipe", "train", name, "--scheduler", found.schedule, "--nproc", str(found.total_ranks)]
    known = config.to_dict() if config is not None else DEFAULTS
    settings = list(wanted.overrides)
    for section, values in run_settings(found, output, config).items():
        for key, value in values.items():
            if key not in known.get(section, {}) or known[section][key] != value:
                settings.append(f"{section}.{key}={value if isinstance(value, str) else json.dumps(value)}")
    return shlex.join([*words, *(word for setting in settings for word in ("--set", setting))])


DEFAULTS: dict[str, Any] = {"parallel": {"data_parallel_size": 1, "replicas": None, "stages_per_rank": None}}
"""What need not be said of a config that is not known."""


def run_settings(found: Plan, path: Path, config: configs.PipelineConfig | None) -> dict[str, dict[str, Any]]:
    """By section, what a config must say so that a run obeys the plan in a file, beside its schedule and its ranks."""
    from vpipe.schedule.catalog import get

    same, each = len(set(found.replicas)) <= 1, found.stages_per_rank
    rows = {"batch_size": found.num_microbatches * found.microbatch_rows}
    return {
        "parallel": {
            "partition": str(path),
            "model_parallel_size": found.num_ranks,
            "data_parallel_size": found.replicas[0] if found.replicas and same else 1,
            "replicas": None if same else list(found.replicas),
            "stages_per_rank": None if each == get(found.schedule).stages_per_rank else each,
        },
        "training": {"num_microbatches": found.num_microbatches},
        "dataset": rows if config is None or config.dataset.max_tokens is None else {},
    }
