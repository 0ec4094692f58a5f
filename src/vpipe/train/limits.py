"""What a config can say and this version cannot do: refused in one sentence, before anything is built.

An option that is accepted and does nothing would be worse.
"""

from __future__ import annotations

from vpipe.config import PipelineConfig
from vpipe.config.pipeline import given_options
from vpipe.errors import UserError
from vpipe.schedule import catalog
from vpipe.schedule.entry import Chain


def refuse(config: PipelineConfig) -> None:
    """Raise where the config asks for what the runtime does not have."""
    parallel, options = config.parallel, given_options(config)
    if parallel.backend == "nccl":
        _need_accelerator(parallel.device)
    entry = catalog.get(parallel.scheduler)
    entry.check_options(options)
    if entry.chains is Chain.UNITS and config.training.gradient_accumulation != 1:
        raise UserError(
            f"training.gradient_accumulation is {config.training.gradient_accumulation}, but scheduler {entry.name} "
            "counts units: give parallel.schedule_options: {update_interval: N} instead"
        )
    shared = entry.runs_threads(parallel.scheduler) or parallel.transport == "inprocess"
    if parallel.priority != "none" and not (shared or parallel.use_orion_scheduler):
        raise UserError(
            f"parallel.priority {parallel.priority} orders work that shares a device, but here every rank is a process "
            "of its own; set parallel.transport: inprocess, or parallel.priority: none"
        )


def refuse_parity(config: PipelineConfig) -> None:
    """Raise where one process cannot replay a run step by step."""
    if config.training.precision == "fp16":
        raise UserError(
            "parity compares fp32 and bf16; the loss scale of fp16 skips updates that a replay would make, so set "
            "training.precision to one of them (--set training.precision=fp32)"
        )


def _need_accelerator(device: str) -> None:
    from vpipe.runtime.device import chosen, is_host  # torch, which a launcher need not load

    if is_host(chosen(device, 1, 0)[0]):
        raise UserError(
            f"parallel.backend is nccl, but parallel.device {device} means the CPU here; run where torch finds an "
            "accelerator, or set parallel.backend: auto (--set parallel.backend=auto)"
        )
