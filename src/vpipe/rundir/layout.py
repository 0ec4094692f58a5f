"""The names in a run directory, stated once for writers and readers.

config.yaml             the resolved config
plan.json               optional: the plan that the run follows
tokenizer.json          the tokenizer of its data, where they have one
lineage.json            the runs that have trained here, each with its parent (``lineage``)
lock                    held by the one process that may write (``lock``)
state.json              the heartbeat: where the run is, and whose run it is (``journal``)
run.json                what runs: schedule, program, placement, stages, versions of the software
metrics.jsonl           one line per training iteration or evaluation, and one where a run was resumed
events/rank<r>.jsonl    the last steps of a rank, action by action; rank<r>.steps.jsonl: one short line per step;
                        the older half of these moves to rank<r>.steps.old.jsonl
crew.json, wanted.json  of an elastic run: its processes, and how many its user wants (``roster``)
left/<run>/             copies of several machines whose launcher is lost, until they are a checkpoint; then ``saved``
summary.json            written at the end, however the run ends, with its ending (``journal``)
page.url                while the live page is served: its address, with the token, for the owner of the run alone
checkpoints/iteration-<n>/, logs/rank<r>.log, report.html, trace.json.gz
"""

from __future__ import annotations

LATEST = "latest"
"""Beside the runs of a directory: a link to the one that began last."""
CONFIG = "config.yaml"
PLAN = "plan.json"
LINEAGE = "lineage.json"
LOCK = "lock"
STATE = "state.json"
RUN = "run.json"
METRICS = "metrics.jsonl"
EVENTS = "events"
STEPS = f"{EVENTS}/rank{{}}.jsonl"
"""Of a rank; so are the two that follow."""
STEP_LINES = f"{EVENTS}/rank{{}}.steps.jsonl"
OLD_STEP_LINES = f"{EVENTS}/rank{{}}.steps.old.jsonl"
CREW = "crew.json"
WANTED = "wanted.json"
LEFT = "left"
SAVED = "saved"
SUMMARY = "summary.json"
CHECKPOINTS = "checkpoints"
LOGS = "logs"
REPORT = "report.html"
TRACE = "trace.json.gz"
TOKENIZER = "tokenizer.json"
PAGE = "page.url"

OF_A_RUN = (
    *(CONFIG, PLAN, LINEAGE, STATE, RUN, METRICS, EVENTS, CREW, WANTED, LEFT, SUMMARY, CHECKPOINTS, LOGS),
    *(REPORT, TRACE, PAGE, TOKENIZER, "tensorboard", "wandb", "command_history.log", "machinefile", "output.log.0"),
)
"""What ``--overwrite`` removes; files of other names are the user's own."""
