"""The directory of a run: made once, by one rank, before anything is computed.

<observe.directory>/<ISO time>/
  config.yaml  run.json  metrics.jsonl  summary.json  events/  checkpoints/  logs/
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vpipe.config import PipelineConfig
from vpipe.errors import UserError


def create(config: PipelineConfig, output_dir: Path | None) -> Path:
    """A new run directory with the resolved config in it."""
    started = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")
    path = output_dir or Path(config.observe.directory) / started
    number = 1
    try:
        while output_dir is None and path.exists():
            number += 1
            path = path.with_name(f"{started}-{number}")
        path.mkdir(parents=True, exist_ok=True)
        config.to_yaml(path / "config.yaml")
    except OSError as error:
        raise UserError(
            f"the run directory {path} cannot be written: {error.strerror}; choose another with --output-dir"
        ) from None
    return path.resolve()


class Journal:
    """What one rank writes down for everyone: ``run.json``, ``metrics.jsonl``, ``summary.json``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._metrics = (directory / "metrics.jsonl").open("a", encoding="utf-8")

    def facts(self, facts: dict[str, Any]) -> None:
        _replace(self._directory / "run.json", facts)

    def metrics(self, line: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()

    def summary(self, summary: dict[str, Any]) -> None:
        _replace(self._directory / "summary.json", summary)

    def close(self) -> None:
        self._metrics.close()


def _replace(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
