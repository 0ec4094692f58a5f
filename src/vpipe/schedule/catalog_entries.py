"""The table of the catalogue: one entry per schedule, in the order in which a newcomer meets them."""

from __future__ import annotations

from vpipe.schedule.catalog import Entry
from vpipe.schedule.gpipe import gpipe, naive
from vpipe.schedule.interleaved import interleaved, looped_bfs
from vpipe.schedule.one_f_one_b import eager_1f1b, one_f_one_b
from vpipe.schedule.pipedream import pipedream, pipedream_2bw

CATALOG: tuple[Entry, ...] = (
    Entry(
        "gpipe",
        gpipe,
        "all forwards, then all backwards",
        bubble="(p-1)T",
        memory="m",
        aliases=("async_threaded", "ScheduleGPipe"),
    ),
    Entry(
        "naive",
        naive,
        "gpipe over a blocking transport, for debugging",
        bubble="(p-1)T",
        memory="m",
        blocking=True,
    ),
    Entry(
        "1f1b",
        one_f_one_b,
        "backwards as early as possible: a rank holds at most p microbatches",
        bubble="(p-1)T",
        memory="rank r: min(m, p-r)",
        aliases=("one_f_one_b", "Schedule1F1B"),
    ),
    Entry(
        "eager-1f1b",
        eager_1f1b,
        "1f1b that runs further ahead, so that latency stays hidden",
        bubble="(p-1)T, also on links with latency",
        memory="rank r: min(m, 2(p-r)-1)",
        aliases=("eager_1f1b",),
    ),
    Entry(
        "interleaved",
        interleaved,
        "1f1b with v stages per rank in a loop: v times smaller bubble, v times more transfers",
        needs="any p and m; the formula holds where p divides m",
        bubble="(p-1)T/v",
        memory="p + (p-1)/v",
        aliases=("interleaved-1f1b", "interleaved_1f1b", "ScheduleInterleaved1F1B"),
        stages_per_rank=2,
        any_stages_per_rank=True,
    ),
    Entry(
        "looped-bfs",
        looped_bfs,
        "gpipe with v stages per rank in a loop, stage by stage",
        needs="any p and m; the formula holds where m ≥ p",
        bubble="(p-1)T/v",
        memory="m",
        aliases=("looped_bfs", "ScheduleLoopedBFS"),
        stages_per_rank=2,
        any_stages_per_rank=True,
    ),
    Entry(
        "pipedream",
        pipedream,
        "asynchronous 1f1b: no flush, each unit keeps the weights it began with",
        mode="asp",
        needs="any p and m; with replicas, m is a multiple of every stage's replicas",
        bubble="0 between two drains",
        memory="rank r: p-r",
        weight_copies="stage s: p-s",
    ),
    Entry(
        "pipedream-2bw",
        pipedream_2bw,
        "asynchronous 1f1b that updates once per batch and keeps two weight versions",
        mode="asp",
        needs="m ≥ p-1",
        bubble="0 between two drains",
        memory="rank r: p-r",
        weight_copies="2",
        aliases=("pipedream_2bw", "2bw", "macrobatch"),
    ),
)
