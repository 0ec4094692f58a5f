"""How the model is spread over ranks: the section ``parallel``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vpipe.config.base import ScheduleName, Section, Text, worded

Ratio = Annotated[float, Field(ge=0, le=1)]
SIZE = r"^\s*[0-9]*\.?[0-9]+\s*([kKmMgGtT][iI]?)?[bB]?\s*$"
Small = Annotated[int, Field(ge=1, le=65536)]


class ParallelConfig(Section):
    """How it is spread over ranks, and in which order the ranks work."""

    scheduler: ScheduleName = worded("async_threaded", "the name of a schedule, or the path of a .csv file")
    """The schedule: gpipe, naive, async_threaded, 1f1b, eager-1f1b, interleaved, looped-bfs, zb-h1 (zerobubble), zb-h2,
    zb-v, zb-auto, v-half, v-min, hanayo, dualpipe-v, chimera, dualpipe, pipedream, pipedream-2bw, or a registered one;
    `vpipe schedules` lists them. A path that ends in .csv is a program of your own, torch's dumps included. --scheduler
    overrides it."""
    model_parallel_size: Small = 4
    """Ranks of one pipeline; also the number of stages where a rank holds one stage."""
    data_parallel_size: Small = 1
    """Copies of every stage; each works on its own batch and the gradients are averaged."""
    replicas: Annotated[tuple[Small, ...], Field(strict=False, min_length=1, max_length=65536)] | None = worded(
        None, "a list with one whole number per stage, or null"
    )
    """Copies per stage where they differ, one number per stage; null takes data_parallel_size for each."""
    stages_per_rank: Annotated[int, Field(ge=1, le=1024)] | None = worded(None, "a whole number, at least 1, or null")
    """Stages that each rank holds (interleaved, looped-bfs); null takes what the schedule needs."""
    partition: Literal["auto"] | Annotated[tuple[Small, ...], Field(strict=False, min_length=1)] | Text = worded(
        "auto", "auto, a list with the number of blocks of each stage, or the path of a plan"
    )
    """Blocks of each stage: auto balances them, a list gives them, a path reads the plan of `vpipe plan` or VPipe's."""
    recompute: Ratio | Annotated[tuple[Ratio, ...], Field(strict=False, min_length=1)] = worded(
        0.0, "a number from 0 to 1, or a list with one per stage"
    )
    """Share of a stage's blocks (the last ones) whose activations are computed again in the backward, not kept."""
    swap: Ratio | Annotated[tuple[Ratio, ...], Field(strict=False, min_length=1)] = worded(
        0.0, "a number from 0 to 1, or a list with one per stage"
    )
    """Share of a stage's blocks (those before the recomputed ones) whose saved activations, and old weights of an
    asynchronous schedule, wait outside device memory: in a file in TMPDIR. Shares are rounded down to whole blocks."""
    adapt: Literal["off", "suggest", "on"] = "off"
    """Move layers between ranks while training, where measured stage times say that it pays within the rest of the run;
    suggest only says what it would do. Results stay the same to the bit with synchronous schedules."""
    memory: Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=SIZE)] | None = worded(
        None, "a size such as 4GiB, or null"
    )
    """For adapt: the most bytes that a rank may hold, such as 4GiB; what is recomputed and swapped then changes with
    the layout. null takes what an accelerator has; on the CPU there is no cap, and recompute and swap stay shares."""
    schedule_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the schedule by their names, such as {update_interval: 4} for pipedream (units per update) or
    {num_waves: 2} for hanayo; `vpipe schedules --json` lists them."""
    transport: Literal["auto", "inprocess", "shm", "distributed"] = "auto"
    """How ranks exchange tensors: threads of one process, shared memory of one machine, or TCP and gloo."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of torch.distributed: auto takes the device's own beside gloo. nccl asks for an accelerator, gloo sends
    what is on one through main memory."""
    device: Text = "auto"
    """Where ranks compute: cpu, an accelerator's type (cuda, xpu, …: a device for every rank of a machine), one device
    that all ranks of a machine share (cuda:0), or auto (the accelerator where torch finds one, else the CPU)."""
    timeout: Annotated[float, Field(gt=0, le=86400)] = 300.0
    """Seconds without a message after which a rank ends the run and says what it waited for. A rank whose process gives
    no sign at all is taken for stopped after 60, or after this if that is less."""
    exact_reduction: bool = True
    """Sum the gradients of replicas in a fixed order, so that results do not change by a bit; false may be faster."""
    priority: Literal["none", "first-hp", "fifo", "critical-path"] = "none"
    """Which work goes first on a shared device: microbatch 0, lower microbatches, or what others wait for. Ranks share
    one with transport: inprocess, or under Orion."""
    use_orion_scheduler: bool = False
    """Let the Orion library (preloaded) order GPU work; USE_ORION_SCHEDULER=1 in the environment does the same."""
