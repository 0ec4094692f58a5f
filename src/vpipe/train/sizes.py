"""An elastic run on another number of ranks than it began with.

Only the number of stages changes: the batch, and with it the replicas, stay what they are, so a synchronous run ends
with the same bits. What a config says about single stages cannot be kept for another number of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from vpipe.config import PipelineConfig
from vpipe.errors import UserError
from vpipe.schedule import catalog


def resized(config: PipelineConfig, num_ranks: int, partition: Sequence[int] = ()) -> PipelineConfig:
    """The config for so many ranks; a partition that was given for another number is cut anew. ``partition`` is where
    layers have moved to, if they have."""
    own = config.parallel.partition
    before = tuple(own) if not isinstance(own, str) else ()
    if num_ranks == config.num_ranks and tuple(partition) in ((), before):
        return config
    values = config.to_dict()
    values["parallel"]["model_parallel_size"] = num_ranks // config.parallel.data_parallel_size
    if partition or num_ranks != config.num_ranks:
        values["parallel"]["partition"] = list(partition) or "auto"
    return PipelineConfig.from_dict(values)


def bounds(config: PipelineConfig) -> tuple[int, int]:
    """The fewest and the most ranks of an elastic run; refuses in words what it cannot be."""
    text = config.launch.elastic
    assert text is not None
    least, most = (int(part) for part in text.split(":"))
    parallel, ranks = config.parallel, config.num_ranks
    remedy = "; remove launch.elastic (--elastic)"
    if parallel.transport == "inprocess" or config.num_ranks == 1:
        raise UserError(f"--elastic needs a process for every rank, and at least two, but this run has one{remedy}")
    if catalog.get(parallel.scheduler).runs_threads:
        raise UserError(
            f"parallel.scheduler {parallel.scheduler} runs worker threads, which cannot be interrupted; --elastic "
            "takes the other schedules, such as --scheduler 1f1b"
        )
    if parallel.use_orion_scheduler:
        raise UserError(f"--elastic leads ranks without Orion, but parallel.use_orion_scheduler is true{remedy}")
    if not least <= ranks <= most:
        raise UserError(
            f"launch.elastic is {text}, but the run has {ranks} ranks; give MIN:MAX so that MIN <= {ranks} <= MAX"
        )
    if least == most:
        return least, most
    told = [f"parallel.{key}" for key in ("recompute", "swap") if isinstance(getattr(parallel, key), tuple)]
    more = {"parallel.replicas": parallel.replicas, "model.split_head": config.model.split_head}
    told += [key for key, given in more.items() if given]
    each = catalog.get(parallel.scheduler).per_stage
    told += [f"parallel.schedule_options.{option}" for option in parallel.schedule_options if option in each]
    if told:
        raise UserError(
            f"{told[0]} says something about each of {parallel.model_parallel_size} stages, but "
            f"launch.elastic {text} allows other numbers of them; give one value for all stages, or launch.elastic: "
            f"{ranks}:{ranks}"
        )
    replicas = parallel.data_parallel_size
    if least % replicas or most % replicas:
        raise UserError(
            f"launch.elastic is {text}, but with parallel.data_parallel_size {replicas} ranks come and go by "
            f"{replicas}; give multiples of {replicas}"
        )
    return least, most


def started(config: PipelineConfig, num_ranks: int) -> PipelineConfig:
    """The config for as many ranks as another launcher has started, without anything that only ours can do."""
    least, most = bounds(config)
    replicas = config.parallel.data_parallel_size
    if not least <= num_ranks <= most or num_ranks % replicas:
        raise UserError(
            f"the launcher has started {num_ranks} ranks, but launch.elastic is {config.launch.elastic}"
            + (f" and every stage has {replicas} replicas" if replicas > 1 else "")
            + "; start another number, or change it"
        )
    values = resized(config, num_ranks).to_dict()
    values["launch"] |= {"elastic": None, "machines": []}
    return PipelineConfig.from_dict(values)


def placed(config: PipelineConfig, nodes: Sequence[str]) -> PipelineConfig:
    """The config for the nodes of a job, which may be fewer than it was written for: as many ranks as have a place, in
    blocks of neighbours, and the places that are left as spares where there are the fewest."""
    least, most = bounds(config)
    per_node = config.launch.slurm.ntasks_per_node or -(-most // len(nodes))
    replicas = config.parallel.data_parallel_size
    fitting = min(most, len(nodes) * per_node) // replicas * replicas
    ranks = min(config.num_ranks, fitting)
    if ranks < least:
        raise UserError(
            f"the job has {len(nodes)} nodes with {per_node} places each, but launch.elastic is {config.launch.elastic}"
            f": {ranks} ranks are too few; ask for more nodes, or lower MIN"
        )
    counts = [ranks // len(nodes) + (index < ranks % len(nodes)) for index in range(len(nodes))]
    machines = [f"{node}:{place}" for node, count in zip(nodes, counts, strict=True) for place in range(count)]
    for _ in range(fitting - ranks):
        index = counts.index(min(counts))
        machines.append(f"{nodes[index]}:{counts[index]}")
        counts[index] += 1
    values = resized(config, ranks).to_dict()
    values["launch"] |= {"elastic": f"{least}:{fitting}", "machines": machines}
    return PipelineConfig.from_dict(values)


def refuse_devices(config: PipelineConfig) -> None:
    """A process keeps its device, so there must be one for each rank of the most; ``launch.machines`` says which."""
    from vpipe.runtime.device import chosen, is_host, num_devices

    wanted, (_, most) = config.parallel.device, bounds(config)
    device = chosen(wanted, 1)[0]
    if is_host(device) or config.launch.machines or str(device) == wanted or most <= num_devices():
        return
    raise UserError(
        f"launch.elastic {config.launch.elastic} allows {most} ranks, each with a device of its own, but this machine "
        f"has {num_devices()} of the device {device.type}; lower MAX, or let all share one by parallel.device: "
        f"{device.type}:0"
    )


def all_of(config: PipelineConfig) -> list[PipelineConfig]:
    """The config with the ranks it begins with, the fewest and the most."""
    return [resized(config, num_ranks) for num_ranks in dict.fromkeys((config.num_ranks, *bounds(config)))]
