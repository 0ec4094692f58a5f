"""Tiny runs in this process: a GPT of four layers on fixed random tokens, two ranks that are threads."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vpipe.config import PipelineConfig
from vpipe.observe.console import Console
from vpipe.train.session import open_session
from vpipe.train.trainer import Trainer
from vpipe.train.worker import StopRequests

TINY: dict[str, Any] = {
    "model": {"name": "gpt", "hidden_size": 16, "num_layers": 2, "num_heads": 2, "sequence_length": 8},
    "dataset": {
        "name": "synthetic",
        "batch_size": 8,
        "extra": {"vocab_size": 32, "num_examples": 32, "num_valid_examples": 16},
    },
    "training": {"learning_rate": 0.01, "num_microbatches": 4, "epochs": 2, "evaluation_interval": -1},
    "parallel": {"model_parallel_size": 2, "scheduler": "1f1b", "transport": "inprocess"},
    "checkpoint": {"interval": -1},
    "observe": {"trace": False, "log_interval": 1},
    "launch": {"threads": 1},
}
"""Four iterations an epoch."""


def tiny(changes: dict[str, Any] | None = None, /, **values: Any) -> dict[str, Any]:
    """``TINY`` with changes: ``{"training.seed": 3}`` or ``training={"seed": 3}``."""
    made: dict[str, Any] = json.loads(json.dumps(TINY))
    for section, inner in values.items():
        made.setdefault(section, {}).update(inner)
    for key, value in (changes or {}).items():
        *path, last = key.split(".")
        place = made
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return made


MADE: list[Trainer] = []
"""The trainers of a test; whichever did not run is closed at its end."""


class Run:
    """A run, what it said, and where it wrote."""

    def __init__(self, config: dict[str, Any], directory: Path, resume: Path | None = None) -> None:
        torch.set_num_threads(1)
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.config = PipelineConfig.from_dict(config)
        self._stream = io.StringIO()
        observe = self.config.observe
        console = Console(self._stream, line_format=observe.line_format, log_interval=observe.log_interval, live=False)
        session = open_session(self.config)
        self.trainer = Trainer(session, directory, StopRequests(session.pipeline), console)
        MADE.append(self.trainer)
        if resume is not None:
            self.trainer.resume(resume)

    def train(self) -> Run:
        self.summary = self.trainer.run()
        return self

    @property
    def said(self) -> str:
        return self._stream.getvalue()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The training lines of metrics.jsonl."""
        return [line for line in self.metrics if line["kind"] == "train"]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        path = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.trainer.session.pipeline.state_dict().items()}

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines]


def run(config: dict[str, Any], directory: Path, resume: Path | None = None) -> Run:
    return Run(config, directory, resume).train()


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def close(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.allclose(left[name], right[name], rtol=1e-4, atol=1e-5) for name in left
    )
