"""What happens around the training: the sections ``checkpoint``, ``observe`` and ``launch``.

The words of ``launch`` reach command lines of ssh, srun and container programs. They are checked here, before anything
else sees them: no spaces, no control characters, nothing that begins with a dash.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vpipe.config.base import Count, Interval, PlainName, Section, Text, worded

MachineName = Annotated[
    str,
    Field(
        pattern=r"^([A-Za-z_][A-Za-z0-9_.-]{0,63}@)?([A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?$"
    ),
]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,:=@%+/\[\]-]{0,255}$")]
SlurmOption = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,63}$")]
Bind = Annotated[str, Field(max_length=4096, pattern=r"^[/~.A-Za-z0-9][^\x00-\x1f\x7f,]*$")]
WORD = "a word without spaces that does not begin with a dash, or null"


class CheckpointConfig(Section):
    """What is kept of a run, to go on from it."""

    directory: Text | None = worded(None, "a path or null")
    """Where checkpoints go, relative to the working directory; null takes checkpoints/ in the run directory."""
    interval: Interval = worded(0, "-1 (never), 0 (after each epoch) or a whole number of iterations")
    """Iterations between two checkpoints; 0 writes one after each epoch, -1 none."""
    keep: Count = 2
    """How many of the latest checkpoints are kept."""
    best: Literal["evaluation.loss", "train.loss", "train.gradient_norm", "train.tokens_per_second"] | None = None
    """A checkpoint is also written, and kept, when this metric is better than ever: after each evaluation, or (train.)
    whenever one is due; null: none. summary.json says which."""
    blocking: bool = False
    """Train on only when a checkpoint is on disk; false writes it beside training, from a copy in memory."""
    on_exit: bool = True
    """For launch.elastic: when the run does not end in order, or the process that started it is killed, the newest copy
    in memory is written as a checkpoint."""
    resume: Text | None = worded(None, "latest, a directory, or null")
    """Go on from this checkpoint directory, or from the latest run, as --resume does; null starts anew."""


class ObserveConfig(Section):
    """What a run shows and writes down."""

    directory: Text = worded("runs", "a path")
    """Parent of the run directories, relative to the working directory."""
    private: bool = True
    """Only you can read the run directories that are made; false lets others as your umask does."""
    log_interval: Annotated[int, Field(ge=0, le=2**31)] = 10
    """Iterations between two lines with loss and throughput; 0 prints none."""
    verbose_interval: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Iterations between two detailed lines of every rank (time per kind of action, waiting); 0 prints none."""
    line_format: Literal["vpipe", "vpipe-line"] = "vpipe"
    """How the lines look: ours, or VPipe's tab-separated `Stage: [3] Epoch: [0][100/2000] ...`."""
    warmup_iterations: Annotated[int, Field(ge=0, le=2**31)] = 2
    """First iterations that are left out of throughput and MFU."""
    trace: bool = True
    """Record every action of the pipeline; the report, the bubble table and trace.json.gz need it."""
    gradient_norms: bool = False
    """Also write the norm of the gradients of each layer and parameter group, after clipping; the page draws them."""
    tensorboard: bool = False
    """Also write loss and metrics for TensorBoard into the run directory."""
    wandb: bool = False
    """Also write loss and metrics for Weights & Biases into the run directory, offline: `wandb sync` uploads them."""
    dashboard: bool = False
    """Serve the live page on this machine while the run lasts."""


class ContainerConfig(Section):
    """The container in which each rank runs."""

    kind: Literal["none", "apptainer", "singularity", "docker", "charliecloud", "bubblewrap"] = "none"
    """Which program starts it; none runs without a container."""
    image: Annotated[str, Field(max_length=4096, pattern=r"^[A-Za-z0-9/._~][^\x00-\x20\x7f]*$")] | None = worded(
        None, "an image name or a path without spaces that does not begin with a dash, or null"
    )
    """Image name, or path of a .sif file or image directory."""
    binds: Annotated[tuple[Bind, ...], Field(strict=False, max_length=64)] = worded(
        (), "a list of paths, each `outside` or `outside:inside`"
    )
    """Directories that the container sees: `outside` or `outside:inside`."""


class SlurmConfig(Section):
    """What `vpipe submit` asks of SLURM; options of the command line override these."""

    nodes: Count = 1
    """Number of nodes."""
    ntasks_per_node: Annotated[int, Field(ge=1, le=1024)] | None = worded(None, "a whole number, at least 1, or null")
    """Ranks per node, of an elastic run the most; null spreads them evenly."""
    options: dict[SlurmOption, Word | Annotated[int, Field(ge=0)]] = worded(
        {}, "a mapping of sbatch's options to words or whole numbers"
    )
    """More of sbatch's options by their own names, such as {partition: gpu, gres: "gpu:4", time: "02:00:00", mem: 64G,
    cpus-per-task: 8}."""
    requeue: bool = True
    """After a preemption the job is queued again and goes on from its latest checkpoint."""


class LaunchConfig(Section):
    """Where the ranks run."""

    machines: Annotated[tuple[MachineName, ...], Field(strict=False, max_length=65536)] = worded(
        (), "a list of host:gpu, one per rank"
    )
    """One host:gpu, user@host:gpu or [IPv6]:gpu per rank (of an elastic run: of the most), started by ssh, in the order
    of the ranks; empty runs all ranks on this machine."""
    through: Literal["ssh", "srun"] = "ssh"
    """How an elastic run reaches its machines: by ssh; or by a step of srun on each node of the SLURM job that it runs
    in: these are its machines then, whatever `machines` lists. `vpipe submit` sets it."""
    container: ContainerConfig = ContainerConfig()
    """The container in which each rank runs."""
    slurm: SlurmConfig = SlurmConfig()
    """What `vpipe submit` asks of SLURM."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processor threads of each rank inside one operation; 0 shares the cores among the ranks of a machine."""
    grace: Annotated[float, Field(gt=0, le=86400)] | None = worded(None, "seconds above 0, at most 86400, or null")
    """Seconds that ranks get to end their update and save when asked to stop; null: as measured, at least 10."""
    elastic: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}:[1-9][0-9]{0,4}$")] | None = worded(
        None, "MIN:MAX, two whole numbers of ranks, or null"
    )
    """MIN:MAX ranks: a rank that is killed or stopped, or lost with its machine, is replaced, or the others go on
    without it, and the run ends as if nothing had happened; null ends the run. --elastic overrides it."""
    on_loss: Literal["replace", "shrink"] = "replace"
    """For elastic: what follows the loss of a rank: a new process in its place, or fewer ranks."""
    interface: PlainName | None = worded(None, WORD)
    """Network interface that gloo and NCCL use, such as eth0; null lets them choose."""
    master_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port at which the ranks meet; 0 takes a free one (under SLURM one derived from the job)."""
