"""``vpipe init``: a first config that trains at once, with a comment at every line that one would change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from vpipe.config.pipeline import dump
from vpipe.config.pipeline import schema as config_schema
from vpipe.errors import UserError
from vpipe.plan.costs import write_text

SCHEMA = "vpipe.schema.json"


@click.command("init")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), required=False)
@click.option(
    "--huggingface",
    metavar="ID|DIR",
    help="A model of transformers: a directory with config.json, a model of the local cache, or a type such as llama.",
)
@click.option(
    "--from-torch",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A Python file with an nn.Sequential, a list of modules, or what registers a model.",
)
@click.option("--schema", is_flag=True, help=f"Write the JSON schema of configs, for editors, to PATH ({SCHEMA}).")
def command(path: Path | None, huggingface: str | None, from_torch: Path | None, schema: bool) -> int:
    """Write a first config with comments to PATH (vpipe.yaml), ready for 'vpipe train'.

    \b
      vpipe init
      vpipe init job.yaml --huggingface path/to/checkpoint
      vpipe init job.yaml --from-torch my_model.py
      vpipe init --schema
    """
    if schema:
        if huggingface is not None or from_torch is not None:
            raise UserError("--schema is that of every config, whatever its model; leave the model out")
        return _write_schema(path or Path(SCHEMA))
    path = path or Path("vpipe.yaml")
    if huggingface is not None and from_torch is not None:
        raise UserError("--huggingface and --from-torch each say which model it is; give one of them")
    refuse_existing(path)
    if huggingface is not None:
        from vpipe.cli.init_huggingface import sections

        model, data, plugins, notes = sections(huggingface, path)
    elif from_torch is not None:
        from vpipe.cli.init_torch import sections as of_torch

        model, data, plugins, notes = of_torch(from_torch, path)
    else:
        model, data, plugins, notes = GPT, SYNTHETIC, "", []
    write_text(path, HEAD.format(path=path) + plugins + model + data + REST)
    for note in notes:
        click.echo(note)
    click.echo(f"{path} is written; train it with: vpipe train {path}")
    return 0


def _write_schema(path: Path) -> int:
    """It holds what this version knows, so it replaces that of another one."""
    write_text(path, json.dumps(config_schema(), indent=1, ensure_ascii=False) + "\n")
    click.echo(f"{path} is written; the first line of a config beside it: # yaml-language-server: $schema={path.name}")
    return 0


def refuse_existing(path: Path) -> None:
    if path.exists():
        raise UserError(f"{path} exists and is not overwritten; give another name, or remove it first")


def line(key: str, value: Any, comment: str = "") -> str:
    """One key of a section, with what there is to say about it."""
    return f"  {key}: {dump(value, flow=True)}" + (f" # {comment}" if comment else "") + "\n"


HEAD = """\
# A first config for vpipe. Every key and its default: vpipe train {path} --print-config, or docs/config.md.

"""

GPT = """\
model:
  name: gpt # or gpt2, llama, bert, translation, huggingface, one of your own (plugins: [my_model.py])
  hidden_size: 64
  num_layers: 4
  num_heads: 4
  sequence_length: 32
  vocab_size: -1 # as many as the data set has

"""

SYNTHETIC = """\
dataset:
  name: synthetic # random tokens, to see it run; then text, code_search_net, bert, translation, or your own
  # path: ../data/mine # where text, code_search_net, bert and translation lie (see 'vpipe data build --help')
  batch_size: 8
  extra:
    vocab_size: 256
    num_examples: 256

"""

REST = """\
training:
  learning_rate: 1e-3
  epochs: 1
  max_iterations: 20 # remove to train on all of the data
  num_microbatches: 4 # a batch is cut into so many units; more of them, smaller bubbles
  optimizer: adamw
  precision: fp32 # bf16 computes in half the memory

parallel:
  model_parallel_size: 2 # ranks, each with a part of the layers
  scheduler: 1f1b # 'vpipe schedules' lists them; 'vpipe plan' chooses one
  partition: auto # or how many layers each stage has, such as [3, 3]

checkpoint:
  interval: 0 # a checkpoint after each epoch; or every so many iterations, or -1: none

observe:
  directory: runs # one directory a run: metrics, trace, report ('vpipe report runs/latest')
"""
