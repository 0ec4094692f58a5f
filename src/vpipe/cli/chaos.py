"""``vpipe chaos``: break a run on purpose and prove that it ended equal to one that was left alone."""

from __future__ import annotations

import json
import random
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import click

from vpipe.cli import loading
from vpipe.cli.options import config_options
from vpipe.config import PipelineConfig
from vpipe.errors import UserError


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--kills", type=click.IntRange(0), default=3, show_default=True, help="Ranks that are killed (SIGKILL).")
@click.option("--stops", type=click.IntRange(0), default=0, show_default=True, help="Ranks that are stopped (SIGSTOP).")
@click.option("--moves", type=click.IntRange(0), default=0, show_default=True, help="Random layouts that are moved to.")
@click.option("--seed", type=int, default=0, show_default=True, help="Decides who is hit, and when.")
@config_options
@click.option("--output-dir", type=click.Path(path_type=Path), help="Keep the runs here; else they are removed.")
@click.option("--json", "as_json", is_flag=True, help="What came of it as JSON, alone on standard output.")
def command(
    config: Path,
    kills: int,
    stops: int,
    moves: int,
    seed: int,
    overrides: tuple[str, ...],
    output_dir: Path | None,
    as_json: bool,
) -> int:
    """Break a run on purpose and prove that it ended equal.

    Ranks are killed and stopped, and layers moved to other ranks. The config is trained once undisturbed, then as often
    as it takes for all blows to fall. Weights, optimizer state, position and all that was told of iterations,
    evaluations and the whole run must be the same, and no process may be left behind. The exit code is 1 where anything
    differs.

    \b
    Examples:
      vpipe chaos configs/gpt_1f1b_cpu.yaml --kills 5 --set training.max_iterations=50
      vpipe chaos configs/gpt_1f1b_cpu.yaml --kills 20 --stops 5 --moves 20 --seed 7 --json
    """
    from vpipe.launch.chaos import MOVE, Blow, Breaker, ChaosResult, differences, recoveries
    from vpipe.schedule.catalog import get
    from vpipe.train.sizes import bounds

    if not kills + stops + moves:
        raise UserError("there is nothing to break; give --kills, --stops or --moves")
    loaded = loading.load(config, overrides).config
    size = f"{loaded.num_ranks}:{loaded.num_ranks}"
    chosen = loaded.launch.elastic or size
    bounds(loading.load(config, (*overrides, f'launch.elastic="{chosen}"')).config)  # refuses what cannot be elastic
    replaces = loaded.launch.on_loss == "replace"
    chance, found = random.Random(seed), ChaosResult()
    blows: list[Blow] = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops + [MOVE] * moves
    cuts = not get(loaded.parallel.scheduler).asynchronous
    chance.shuffle(blows)
    with ExitStack() as stack:
        folder = output_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vpipe-chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        breaker = Breaker(_words(config, loaded, overrides), ["--elastic", chosen], folder, replaces, cuts, _say)
        whole = breaker.undisturbed()
        while blows and not found.problems:
            before = len(blows)
            directory = breaker.broken(found.runs + 1, blows, chance, found)
            if not found.problems:
                found.problems += differences(whole, directory)
                found.recoveries += recoveries(directory)
            if len(blows) == before:
                found.problems.append("the run ended before it could be broken; train longer (training.max_iterations)")
    _tell(found, as_json)
    return 1 if found.problems else 0


def _say(text: str) -> None:
    click.echo(text, err=True)


def _words(config: Path, loaded: PipelineConfig, overrides: tuple[str, ...]) -> list[str]:
    """The command that both runs share; each writes at least its last checkpoint, into its own directory."""
    kept = loaded.checkpoint.interval if loaded.checkpoint.interval >= 0 else 2**31
    own = (f"checkpoint.interval={kept}", "checkpoint.directory=null", "launch.elastic=null")
    return ["train", str(config), *(word for override in (*overrides, *own) for word in ("--set", override))]


def _tell(found: Any, as_json: bool) -> None:
    totals = [sum(parts.values()) for parts in found.recoveries]
    facts = {
        "runs": found.runs,
        "kills": found.kills,
        "stops": found.stops,
        "moves": found.moves,
        "recoveries": len(totals),
        "median_seconds": median(totals) if totals else None,
        "parts": {name: median(parts[name] for parts in found.recoveries) for name in (found.recoveries or [{}])[0]},
        "median_noticed": median(found.noticed) if found.noticed else None,
        "equal": not found.problems,
        "problems": found.problems,
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    for problem in found.problems:
        click.echo(problem)
    seconds = f", {facts['median_seconds']:.2f} s each (median)" if totals else ""
    click.echo(
        f"{found.kills} kills, {found.stops} stops and {found.moves} moves over {found.runs} runs, {len(totals)} "
        f"recoveries{seconds}: "
        + ("NOT equal to the undisturbed run" if found.problems else "equal to the undisturbed run, to the bit")
    )
