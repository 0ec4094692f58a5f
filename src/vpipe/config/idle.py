"""Keys that are set but do nothing in this config: told as warnings, because an option that does nothing is a trap."""

from __future__ import annotations

from vpipe.config.pipeline import PipelineConfig
from vpipe.config.sections import TrainingConfig

MOMENTS = ("adam", "adamw", "lamb")
"""Optimizers that have two moments; one of a plugin gets ``optimizer_options`` instead."""


def idle_keys(config: PipelineConfig) -> list[str]:
    """One sentence per key that differs from its default and is read by nothing here."""
    training = config.training
    optimizer, policy = training.optimizer, training.learning_rate_policy
    read_by = {
        "momentum": (optimizer == "sgd", f"optimizer {optimizer}"),
        "betas": (optimizer in MOMENTS, f"optimizer {optimizer}"),
        "eps": (optimizer in MOMENTS, f"optimizer {optimizer}"),
        "learning_rate_degree": (policy == "polynomial", f"learning_rate_policy {policy}"),
        "learning_rate_steps": (policy == "step", f"learning_rate_policy {policy}"),
        "learning_rate_factor": (policy == "step", f"learning_rate_policy {policy}"),
        "minimum_learning_rate": (policy != "constant", "learning_rate_policy constant"),
        "loss_scale": (training.precision == "fp16", f"precision {training.precision}"),
        "exit_after_profile": (training.profile_iteration >= 0, "profile_iteration -1"),
        "evaluation_batches": (training.evaluation_interval >= 0, "evaluation_interval -1"),
    }
    defaults = {name: field.default for name, field in TrainingConfig.model_fields.items()}
    return [
        f"training.{name} has no effect with {reason}"
        for name, (is_read, reason) in read_by.items()
        if not is_read and getattr(training, name) != defaults[name]
    ]
