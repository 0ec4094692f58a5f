"""Other people's dashboards: the lines of metrics.jsonl, handed on.

TensorBoard's event files are written by the package ``tensorboard`` alone, without torch. Weights & Biases writes into
the run directory and sends nothing: ``wandb sync`` does that, when the user says so. A logger takes the same lines as
the file, so that nothing is measured twice; another one is a class with the same two methods and a name in ``LOGGERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from vpipe.errors import UserError

NAMES = {
    "loss": "loss",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second",
    "seconds": "seconds per iteration",
    "gradient_norm": "gradient norm",
}
"""Field of a line → name of its curve."""


class Logger(Protocol):
    """What receives the lines."""

    def log(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""

    def close(self) -> None:
        """Nothing comes after this."""


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The curves that a line adds a point to."""
    kind = "evaluation" if line.get("kind") == "evaluation" else "train"
    return {
        f"{kind}/{name}": float(line[key])
        for key, name in NAMES.items()
        if isinstance(line.get(key), int | float) and not (kind == "evaluation" and key != "loss")
    }


class TensorBoard:
    """Event files in ``<run>/tensorboard``: ``tensorboard --logdir runs``."""

    def __init__(self, run_directory: str | Path, config: Mapping[str, Any]) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise UserError(
                "observe.tensorboard needs the package tensorboard; install it with: pip install 'vpipe[tensorboard]'"
            ) from None
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(Path(run_directory) / "tensorboard"))

    def log(self, line: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line).items()]
        when, step = float(line.get("time") or 0.0), int(line.get("iteration") or 0)
        self._writer.add_event(self._event(wall_time=when, step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.flush()
        self._writer.close()


class WeightsAndBiases:
    """An offline run in ``<run>/wandb``: ``wandb sync <run>/wandb/offline-run-*`` uploads it."""

    def __init__(self, run_directory: str | Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                "observe.wandb needs the package wandb; install it with: pip install 'vpipe[wandb]'"
            ) from None
        quiet = wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True, x_disable_meta=True)
        self._end = wandb.teardown
        self._run = wandb.init(
            mode="offline",
            project="vpipe",
            name=Path(run_directory).name,
            dir=str(run_directory),
            config=dict(config),
            settings=quiet,
        )

    def log(self, line: Mapping[str, Any]) -> None:
        self._run.log(scalars(line), step=int(line.get("iteration") or 0))

    def close(self) -> None:
        self._run.finish()
        self._end()  # its helper process writes the last records, and must not outlive the run


LOGGERS: dict[str, Callable[[str | Path, Mapping[str, Any]], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
"""Field of the section ``observe`` → what it switches on."""
