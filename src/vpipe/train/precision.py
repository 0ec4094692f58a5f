"""Number formats: what autocast computes in, and how losses are scaled so that fp16 gradients do not vanish.

Weights are always kept and updated in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from vpipe.config.sections import TrainingConfig
from vpipe.runtime.updates.update import LossScale

START_SCALE = 2.0**16


def autocast(training: TrainingConfig, device: str = "cpu") -> Callable[[], AbstractContextManager[Any]]:
    """The context in which layers run."""
    if training.precision == "fp32":
        return nullcontext
    dtype = torch.bfloat16 if training.precision == "bf16" else torch.float16
    return partial(torch.autocast, device, dtype=dtype)


def loss_scale(training: TrainingConfig) -> LossScale:
    """For fp16 a factor on the loss, fixed or found; otherwise none."""
    if training.precision != "fp16":
        return LossScale()
    if training.loss_scale == "dynamic":
        return LossScale(START_SCALE, dynamic=True)
    return LossScale(float(training.loss_scale))
