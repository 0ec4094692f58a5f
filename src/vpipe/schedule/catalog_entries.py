"""The table of the catalogue: one entry per schedule, in the order in which a newcomer meets them."""

from __future__ import annotations

from vpipe.schedule.catalog import Entry
from vpipe.schedule.dualpipe import dualpipe_v
from vpipe.schedule.gpipe import gpipe, naive
from vpipe.schedule.interleaved import interleaved, looped_bfs
from vpipe.schedule.one_f_one_b import eager_1f1b, one_f_one_b
from vpipe.schedule.pipedream import pipedream, pipedream_2bw
from vpipe.schedule.v_shape import v_half, v_min, zb_v
from vpipe.schedule.wave import hanayo
from vpipe.schedule.zero_bubble import zb_h1, zb_h2
from vpipe.schedule.zero_bubble_auto import zb_auto

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
        needs="any p and m; the bubble holds where m ≥ p, the memory where p divides m",
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
        "zb-h1",
        zb_h1,
        "1f1b with the weight gradients moved into the holes at its end",
        needs="any p and m; the formula holds where m ≥ p and W ≤ I",
        bubble="(p-1)(F+I-W)",
        memory="p on every rank",
        aliases=("zerobubble", "zero_bubble", "zb_h1", "ZBH1"),
    ),
    Entry(
        "zb-h2",
        zb_h2,
        "zb-h1 with twice the microbatches in flight: no rank pauses",
        needs="any p and m; the formula holds where m ≥ 2p-1",
        bubble="max((p-1)F, (p-1)(F+I-2W)); of one rank's own span max(0, (p-1)(F+I-2W))",
        memory="2p-1 on every rank",
        aliases=("zb_h2", "ZBH2"),
    ),
    Entry(
        "zb-auto",
        zb_auto,
        "the best zero-bubble order found for given stage times and memory",
        needs="any p and m; costs has one (F, I, W) per stage, memory_limit is at least 1",
        bubble="at most that of 1f1b, zb-h1 and zb-h2 within the memory",
        memory="memory_limit",
        aliases=("zb_auto",),
    ),
    Entry(
        "zb-v",
        zb_v,
        "zero bubble on a V: both ends of the model on rank 0, no more memory than 1f1b",
        needs="any p and m; the formula holds where F = I = W and m ≥ 2p-1",
        bubble="(p-1)F/2; of one rank's own span 0",
        memory="p on every rank",
        aliases=("zb_v", "zbv", "ScheduleZBVZeroBubble", "ZBVZeroBubble"),
        stages_per_rank=2,
    ),
    Entry(
        "v-half",
        v_half,
        "on a V with half of 1f1b's memory",
        bubble="about half of 1f1b's",
        memory="⌊(p+2)/2⌋",
        aliases=("v_half", "vhalf"),
        stages_per_rank=2,
    ),
    Entry(
        "v-min",
        v_min,
        "on a V with a third of 1f1b's memory",
        bubble="about two thirds of 1f1b's",
        memory="⌊(p+4)/3⌋",
        aliases=("v_min", "vmin"),
        stages_per_rank=2,
    ),
    Entry(
        "hanayo",
        hanayo,
        "waves down and up the ranks, v/2 of them (num_waves)",
        needs="v even: two stages per rank for each wave",
        bubble="about (2p-2)/(3pW+p-1) of the makespan at m = p, W waves and I+W = 2F",
        memory="p at m = p, at most about 3p/2 beyond",
        aliases=("wave",),
        stages_per_rank=2,
        any_stages_per_rank=True,
    ),
    Entry(
        "dualpipe-v",
        dualpipe_v,
        "on a V with forwards and backwards of opposite halves side by side",
        needs="any p and m; the formula holds where F = W ≤ I and m ≥ 2p",
        bubble="(p-1)(FB+(I+W)-3W)/2, FB = F+I+W if a pair is not overlapped",
        memory="p + 1/2",
        aliases=("dualpipe_v", "dualpipev", "ScheduleDualPipeV"),
        stages_per_rank=2,
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
