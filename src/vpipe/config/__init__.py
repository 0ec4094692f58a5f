"""A training job as typed, closed, documented data.

    loaded = load("configs/gpt_small.yaml", overrides=["training.epochs=1"])
    loaded.config.training.learning_rate

No torch is imported here: a config is checked in a moment on a login node.

Words: docs/glossary.md.
"""

from vpipe.config.load import Loaded, load
from vpipe.config.pipeline import PipelineConfig, commented, schema
from vpipe.config.placement import ParallelConfig
from vpipe.config.problems import ConfigError, Problem, dotted
from vpipe.config.running import CheckpointConfig, ContainerConfig, LaunchConfig, ObserveConfig, SlurmConfig
from vpipe.config.sections import DatasetConfig, ModelConfig, TrainingConfig

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "ContainerConfig",
    "DatasetConfig",
    "LaunchConfig",
    "Loaded",
    "ModelConfig",
    "ObserveConfig",
    "ParallelConfig",
    "PipelineConfig",
    "Problem",
    "SlurmConfig",
    "TrainingConfig",
    "commented",
    "dotted",
    "load",
    "schema",
]
