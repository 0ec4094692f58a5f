"""A SLURM job as text: a pure function from what is asked to the script that asks for it.

One srun task per rank: SLURM places the ranks (``--distribution=block``: rank 0, 1, ... on the first node), and no
second launcher stands between it and them. The script does three things that no rank can do for itself: it finds the
address of the first node, forwards the signal that announces a preemption or the end of the time limit, and puts the
job back into the queue when the ranks have saved their checkpoint. A queued-again job goes on from its latest one.

    sbatch ──▶ script on node 0 ──▶ srun ──▶ rank 0 (node 0) … rank k (node 0), rank k+1 (node 1) …
      USR1 ─────▶ forwarded ────────────────▶ checkpoint, exit ─────▶ scontrol requeue

The job of an elastic run has a launcher of its own instead, on the first node, and a step for each node
(``slurm_nodes``); SLURM leaves it the other nodes when one is lost (``--no-kill``), and may start it again with fewer.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from vpipe.errors import UserError
from vpipe.launch import command_words as valid
from vpipe.launch.container import NONE, Container, wrap
from vpipe.process import AS_MODULE

GRACE = 60
"""Seconds before the end at which SLURM sends USR1: time for an iteration and a checkpoint."""

USEFUL = 120
"""Seconds of training below which a time limit is hardly worth the start."""

OWN = (
    *("job-name", "nodes", "ntasks", "ntasks-per-node", "mincpus", "array", "output", "open-mode", "no-kill"),
    *("requeue", "no-requeue", "signal"),
)
"""Options that the script says itself."""
LIVES = 3
"""How often in a row a job may be queued again without having saved anything new."""

Point = tuple[str, ...]
"""The overrides of one run of a sweep: ``("training.learning_rate=1e-3", "parallel.scheduler=1f1b")``."""


@dataclass(frozen=True)
class SlurmJob:
    """What is asked of SLURM. Every word is checked when the job is made."""

    config: str
    num_nodes: int
    """Of an elastic run: the most."""
    tasks_per_node: int
    name: str = "vpipe"
    python: str = "python"
    arguments: tuple[str, ...] = ()
    """More words for ``vpipe train``."""
    run_directory: str = "runs"
    """Parent of the run directories, as the config has it."""
    checkpoint_directory: str | None = None
    container: Container = NONE
    options: Mapping[str, str] = field(default_factory=dict)
    """More of sbatch's options, by its own names."""
    requeue: bool = True
    interface: str | None = None
    port: int = 0
    points: tuple[Point, ...] = ()
    """The runs of a sweep; empty for a single run."""
    elastic: bool = False
    """Ranks, and with them nodes, come and go."""
    least_nodes: int | None = None
    """The fewest nodes that an elastic run starts with; by default ``num_nodes``."""
    array: str | None = None
    """Which of them, or seeds where there is no sweep."""

    def __post_init__(self) -> None:
        for name in ("num_nodes", "tasks_per_node"):
            if getattr(self, name) < 1:
                raise UserError(f"{name.replace('_', ' ')} is {getattr(self, name)} but must be at least 1")
        valid.path(self.config, "the config")
        valid.path(self.python, "the Python program")
        valid.path(self.run_directory, "observe.directory")
        if self.checkpoint_directory is not None:
            valid.path(self.checkpoint_directory, "checkpoint.directory")
        for name, value in {"name": self.name, "interface": self.interface, **self.options}.items():
            if value is None:
                continue
            where = f"launch.slurm.options.{valid.option(name, 'an option of SLURM')}"
            (valid.duration if name == "time" else valid.option)(value, where)
        if own := [name for name in OWN if name in self.options]:
            raise UserError(f"launch.slurm.options has {own[0]}, which the job's script says itself; leave it out")
        if self.array is not None:
            valid.array(self.array, "--with array")
        for argument in (*self.arguments, *(word for point in self.points for word in point)):
            valid.argument(argument, "an argument of the job")

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.tasks_per_node

    @property
    def indices(self) -> str | None:
        """The array that SLURM is asked for."""
        return self.array or (f"0-{len(self.points) - 1}" if self.points else None)


def sweep(axes: Sequence[str]) -> tuple[Point, ...]:
    """Every combination of ``section.key=a,b,c``; the last axis moves fastest."""
    choices = []
    for axis in axes:
        key, equals, values = axis.partition("=")
        if not equals or "." not in key or not all(value.strip() for value in values.split(",")):
            raise UserError(
                f"--sweep {valid.shown(axis)} is not section.key=a,b such as training.learning_rate=1e-3,1e-4"
            )
        choices.append([f"{key.strip()}={value.strip()}" for value in values.split(",")])
    return tuple(product(*choices)) if choices else ()


def script(job: SlurmJob) -> str:
    """The job script."""
    meeting = [] if job.elastic else _meeting(job)
    lines = [*_options(job), "", *meeting, *_which_run(job), *_resume(job), "", *_launch(job)]
    return "\n".join(["#!/bin/bash", *lines, ""])


def _options(job: SlurmJob) -> list[str]:
    """What sbatch reads. Each value is one checked word, so a line is one option. Of a range of nodes SLURM takes as
    few as its tasks fit on; asked for cores instead, it takes as many as it has."""
    log = "%A_%a" if job.indices else "%j"
    wanted: dict[str, str | int | None] = {
        "job-name": job.name,
        "nodes": f"{job.least_nodes}-{job.num_nodes}" if job.least_nodes else job.num_nodes,
        "ntasks-per-node": None if job.elastic else job.tasks_per_node,
        "mincpus": job.tasks_per_node * int(job.options.get("cpus-per-task", 1)) if job.elastic else None,
        **{name: value for name, value in job.options.items() if name != "cpus-per-task" or not job.elastic},
        "array": job.indices,
        "output": f"slurm-{log}.out",
        "open-mode": "append",
    }
    said = [f"{name}={value}" for name, value in wanted.items() if value is not None]
    said += ["no-kill"] if job.elastic else []
    said += ["requeue", f"signal=B:USR1@{GRACE}"] if job.requeue else ["no-requeue"]
    return [f"#SBATCH --{option}" for option in said]


def _meeting(job: SlurmJob) -> list[str]:
    """Where the ranks meet, by SLURM's own address of the first node, because its name may not resolve; and how."""
    found = [
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        'MASTER_ADDR=$(scontrol --oneliner show node "$first" | sed -n "s/.* NodeAddr=\\([^ ]*\\).*/\\1/p")',
        'if [ -z "$MASTER_ADDR" ]; then',
        '  echo "vpipe: SLURM does not tell the address of node $first; set MASTER_ADDR here" >&2',
        "  exit 2",
        "fi",
        "export MASTER_ADDR",
    ]
    lines = ["export MASTER_ADDR=127.0.0.1"] if job.num_nodes == 1 else found
    secret = "$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n')"
    lines.append(f'export VPIPE_SECRET="{secret}"  # for the ranks of this job alone')
    lines += [f"export MASTER_PORT={job.port}"] if job.port else []
    names = ("GLOO", "NCCL") if job.interface else ()
    return [*lines, *(f"export {name}_SOCKET_IFNAME={shlex.quote(job.interface or '')}" for name in names), ""]


def _which_run(job: SlurmJob) -> list[str]:
    """The run directory, which a queued-again job finds again, and the overrides of this run of a sweep."""
    parent = shlex.quote(job.run_directory)
    if not job.indices:
        return [f'run={parent}/slurm-"$SLURM_JOB_ID"', "overrides=()"]
    lines = [f'run={parent}/slurm-"$SLURM_ARRAY_JOB_ID"_"$SLURM_ARRAY_TASK_ID"']
    if not job.points:
        return [*lines, 'overrides=(--set training.seed="$SLURM_ARRAY_TASK_ID")']
    lines.append('case "$SLURM_ARRAY_TASK_ID" in')
    for index, point in enumerate(job.points):
        quoted = shlex.join(word for override in point for word in ("--set", override))
        lines.append(f"  {index}) overrides=({quoted}) ;;")
    return [*lines, f'  *) echo "vpipe: the sweep has runs 0..{len(job.points) - 1}" >&2; exit 2 ;;', "esac"]


def limit_warning(job: SlurmJob) -> str | None:
    """A time limit that leaves next to nothing for training, in a sentence."""
    time = job.options.get("time")
    if time is None or not job.requeue:
        return None
    useful = seconds(time) - GRACE
    if useful >= USEFUL:
        return None
    return (
        f"the time {time} leaves {max(0, useful)} s before SLURM announces the end ({GRACE} s ahead), and starting "
        f"takes some of it: the job may be queued again without progress; give at least {GRACE + USEFUL} s"
    )


def seconds(time: str) -> int:
    """SLURM's times: ``min``, ``min:sec``, ``hours:min:sec``, ``days-hours[:min[:sec]]``."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, secs = (*parts, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + secs
    if len(parts) == 3:
        return (parts[0] * 60 + parts[1]) * 60 + parts[2]
    return parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)


def _resume(job: SlurmJob) -> list[str]:
    where = '"$run"/checkpoints' if job.checkpoint_directory is None else shlex.quote(job.checkpoint_directory)
    return [
        f"saved() {{ compgen -G {where}/'iteration-*' | sort -V | tail -n 1; }}",
        "before=$(saved)",
        "resume=()",
        'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then',
        "  resume=(--resume latest)  # where there is no checkpoint yet, it begins anew",
        '  echo "vpipe: queued again ($SLURM_RESTART_COUNT); going on from the latest checkpoint, if there is one"',
        "fi",
    ]


def _launch(job: SlurmJob) -> list[str]:
    python = "python3" if job.container.kind != "none" and job.python == "python" else job.python
    variables = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", *_SLURM, *_SECRETS)
    inside = [python, AS_MODULE, "vpipe", "train", job.config, *job.arguments]
    if job.elastic:
        places = f"launch.slurm.ntasks_per_node={job.tasks_per_node}"
        command = shlex.join([*inside, "--set", "launch.through=srun", "--set", places])
    elif job.container.kind == "none":
        command = shlex.join(inside)
    else:
        command = shlex.join(wrap(job.container, inside, _HERE, variables)).replace(_HERE, '"$PWD"')
    cpus = f" --cpus-per-task={job.options['cpus-per-task']}" if "cpus-per-task" in job.options else ""
    srun = (
        f"srun --export=ALL --kill-on-bad-exit=1 --nodes={job.num_nodes} --ntasks={job.num_ranks} "
        f"--ntasks-per-node={job.tasks_per_node}{cpus} --distribution=block \\"
    )
    last = f'{"" if job.elastic else "  "}{command} --output-dir "$run" "${{overrides[@]}}" "${{resume[@]}}"'
    before = [] if job.elastic else [srun]
    return (
        [
            "announced=0 step=",
            """trap 'announced=1; [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null' USR1""",
            *before,
            f"{last} &",
            'step=$!; [ "$announced" -eq 0 ] || kill -USR1 "$step" 2>/dev/null  # announced before there was a step',
            "while true; do",
            '  wait "$step"; code=$?',
            '  kill -0 "$step" 2>/dev/null || break  # a signal ends a wait before the step has ended',
            "done",
            "# 75: saved a checkpoint and left; above 128: ended by a signal before it could",
            'if [ "$announced" -eq 1 ] && { [ "$code" -eq 75 ] || [ "$code" -gt 128 ]; }; then',
            *_queue_again(),
            "fi",
            'exit "$code"',
        ]
        if job.requeue
        else [*before, last]
    )


def _queue_again() -> list[str]:
    """Back into the queue, unless the last lives have saved nothing new: that would go on for ever."""
    return [
        '  mkdir -p "$run"; idle=$(cat "$run"/lives-without-progress 2>/dev/null || echo 0)',
        '  if [ "$(saved)" = "$before" ]; then idle=$((idle + 1)); else idle=0; fi',
        '  echo "$idle" > "$run"/lives-without-progress',
        f'  if [ "$idle" -ge {LIVES} ]; then',
        f'    echo "vpipe: {LIVES} times in a row this job saved nothing new before its end: not queued again; '
        'raise --time or lower checkpoint.interval" >&2',
        '    exit "$code"',
        "  fi",
        '  echo "vpipe: interrupted; queueing again"',
        '  scontrol requeue "$SLURM_JOB_ID" && sleep 60',
    ]


_HERE = "/vpipe-working-directory"
"""Stands for the working directory until the script runs."""

_SLURM = (
    *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_NODEID", "SLURM_PROCID"),
    *("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"),
    "SLURM_STEP_TASKS_PER_NODE",
)
_SECRETS = ("VPIPE_SECRET", "HF_TOKEN", "HF_HOME", "WANDB_API_KEY", "USE_ORION_SCHEDULER")
"""Names, never values: docker takes the values from the environment of its caller."""
