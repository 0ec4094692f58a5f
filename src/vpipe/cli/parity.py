"""``vpipe parity``: is the pipelined training equal to one process, to the bit?"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from vpipe import config as configs
from vpipe.cli import completion, loading
from vpipe.cli.options import config_options
from vpipe.errors import UserError


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Iterations to compare.")
@click.option("--scheduler", shell_complete=completion.schedules, help="The schedule, instead of the config's.")
@config_options
@click.option(
    "--reference",
    type=click.Choice(["auto", "plain", "replay"]),
    default="auto",
    show_default=True,
    help="Compare with a plain loop that shares no code with the pipeline, or with the replay of weight versions; "
    "auto: plain, or replay for an asynchronous schedule.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    config: Path,
    steps: int,
    scheduler: str | None,
    overrides: tuple[str, ...],
    reference: str,
    as_json: bool,
) -> int:
    """Train pipelined and in one process, and compare loss, gradients and weights to the bit.

    Exit code 0: equal. 1: not equal, with the first tensor that differs.

    \b
    Example:
      vpipe parity configs/default.yaml --scheduler zb-v --steps 3
    """
    loaded = loading.load(config, overrides, scheduler)
    chosen = loaded.config.model_copy(
        update={"launch": loaded.config.launch.model_copy(update={"threads": 1})}  # more threads add in another order
    )
    with tempfile.TemporaryDirectory(prefix="vpipe-parity-") as directory:
        code = _pipelined(chosen, directory, steps)
        if code:
            return code
        import torch

        from vpipe.train.proof import parity
        from vpipe.train.session import open_session

        torch.set_num_threads(1)
        session = open_session(chosen)
        reference = parity.choose_reference(reference, session)
        expected = parity.sequential(session, steps, reference)
        result = parity.compare(Path(directory), expected)
    if as_json:
        facts = {
            "equal": result.equal,
            "steps": steps,
            "tensors": result.num_tensors,
            "difference": result.difference,
            "largest_difference": result.largest,
            "scheduler": chosen.parallel.scheduler,
            "ranks": chosen.num_ranks,
            "reference": reference,
        }
        click.echo(json.dumps(facts))
    elif result.equal:
        click.echo(
            f"equal to the bit: {result.num_tensors} tensors (loss, gradients, weights) over {steps} steps, "
            f"{chosen.parallel.scheduler} on {chosen.num_ranks} ranks against one process ({_LOOPS[reference]})"
        )
    else:
        click.echo(f"not equal: {result.difference}")
    return 0 if result.equal else 1


_LOOPS = {"plain": "a plain loop", "replay": "the replay of weight versions"}


def _pipelined(config: configs.PipelineConfig, directory: str, steps: int) -> int:
    """The pipelined side, in the files of ``directory``: on local ranks, or in this process."""
    from vpipe.launch import local
    from vpipe.launch.zygote_start import PRELOAD

    _refuse_fp16(config)
    arguments: dict[str, Any] = {"config": config.to_dict(), "directory": directory, "steps": steps}
    if config.parallel.transport == "inprocess" or config.num_ranks == 1:
        import torch

        from vpipe.train.proof import parity

        loading.refuse(config)
        torch.set_num_threads(1)
        return parity.pipelined(**arguments)
    preload = (*PRELOAD, "vpipe.train.proof.parity")
    return local.run(
        "vpipe.train.proof.parity:pipelined",
        config.num_ranks,
        arguments=arguments,
        threads=1,
        preload=preload,
        check=loading.check(config),
    )


def _refuse_fp16(config: configs.PipelineConfig) -> None:
    """Raise where one process cannot replay a run step by step."""
    if config.training.precision == "fp16":
        raise UserError(
            "parity compares fp32 and bf16; the loss scale of fp16 skips updates that a replay would make, so set "
            "training.precision to one of them (--set training.precision=fp32)"
        )
