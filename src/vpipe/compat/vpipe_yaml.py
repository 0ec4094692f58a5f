"""VPipe's experiment files: one flat YAML mapping, a plan in JSON, a rank map in JSON; translated into our sections.

What a key meant is kept where it had a meaning; every key that has none here is answered with a warning. ``directory``
and ``module`` named Python code to import. They are never imported: ``model_type`` chooses a built-in model. They only
help to find the two JSON files, which VPipe looked up beside that code.

A *unit* (VPipe's minibatch) is what flows through the pipe, and VPipe's ``batch_size`` is the size of one unit. Our
``dataset.batch_size`` is one iteration, ``num_microbatches`` units: 32 unless the file says otherwise (VPipe's fixed
number for ``bsp``; asynchronous runs update after every unit all the same), one per stage with ``macrobatch``.
Frequencies, which VPipe counts in units, become iterations.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path
from typing import Any

from vpipe.compat.rank_map import RankMap, read_rank_map
from vpipe.compat.vpipe_keys import (
    FAMILIES,
    KEYS,
    LARGE_GPT,
    MEANINGLESS,
    RENAMED,
    STEP_EPOCHS,
    TIED,
    UNITS,
    WARMUP,
)
from vpipe.config.document import Document, absolute, read_json
from vpipe.config.load import read_plan
from vpipe.config.problems import ConfigError, Key, short
from vpipe.errors import nearest


def translate(document: Document, source: Path) -> tuple[Document, list[str]]:
    """The file in our sections, with its own lines and keys for errors, and the warnings; one that has none of VPipe's
    keys stays as it is."""
    if not set(document.value) & set(KEYS):
        return document, []
    work = _Translation(document.value, document, source)
    work.translate()
    made = Document(work.made, document.lines, document.problems, document.file, work.old_keys)
    return made, work.warnings


@dataclass
class _Translation:
    old: dict[str, Any]
    document: Document
    source: Path
    made: dict[str, dict[str, Any]] = field(default_factory=dict)
    old_keys: dict[Key, Key] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, old: str) -> None:
        section, name = key.split(".")
        self.made.setdefault(section, {})[name] = value
        self.old_keys[(section, name)] = (old,)

    def warn(self, old: str, text: str) -> None:
        line = self.document.line((old,))
        self.warnings.append(f"{self.source}, line {line}: {old} {text}")

    def flag(self, name: str) -> bool:
        """A boolean of the old file; anything else is a problem."""
        value = self.old.get(name, False)
        if not isinstance(value, bool):
            self.document.complain((name,), f"is {short(value)} but must be true or false")
            return False
        return value

    def translate(self) -> None:
        for name in self.old:
            if name in MEANINGLESS:
                self.warn(name, f"has no meaning any more: it {MEANINGLESS[name]}")
            elif name not in KEYS:
                self.document.complain((name,), f"is an unknown key of a VPipe file{nearest(name, KEYS)}")
        self.family()
        for name, key in RENAMED.items():
            if name in self.old:
                self.put(key, self.old[name], name)
        num_stages = self.placement()
        scheduler = self.schedule(num_stages)
        self.units(scheduler, num_stages)
        self.learning_rate()
        self.momentum()
        self.container()

    def family(self) -> None:
        model_type = self.old.get("model_type")
        directory = self.old.get("directory")
        if model_type is None and isinstance(directory, str) and Path(directory).name in FAMILIES:
            model_type = Path(directory).name  # the documents' files name the model by the folder of its code
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            told = "is missing" if model_type is None else f"is {short(model_type)}"
            hint = nearest(str(model_type), FAMILIES)
            self.document.complain(("model_type",), f"{told} but must be one of {', '.join(FAMILIES)}{hint}")
            model_type = "bert"
        for section, values in FAMILIES[model_type].items():
            for name, value in values.items():
                self.put(f"{section}.{name}", value, "model_type")
        if model_type == "gpt" and "large" in f"{self.old.get('module', '')}":
            for name, value in LARGE_GPT.items():
                self.put(f"model.{name}", value, "module")
        if self.flag("synthetic_data"):
            self.put("dataset.name", "synthetic", "synthetic_data")
            vocab_size = self.old.get("vocab_size", FAMILIES[model_type]["model"].get("vocab_size"))
            options = {} if vocab_size is None else {"vocab_size": vocab_size}
            self.put("dataset.extra", {"kind": model_type, **options}, "synthetic_data")
            if "data_dir" in self.old:
                self.warn("data_dir", "is not read with synthetic_data: true")
                del self.old["data_dir"]

    def placement(self) -> int | None:
        """Partition, ratios, replicas and depths; the number of stages if any of them tells it."""
        counts: dict[str, int] = {}
        plan = self.json("partition")
        if plan is not None and "partition" in plan:
            self.put("parallel.partition", plan["partition"], "partition")
            counts["partition"] = len(plan["partition"])
            if self.made["model"]["name"] == "bert" and "num_layers" not in self.old:
                self.bert_layers(sum(plan["partition"]))
        elif plan is not None:
            counts["partition"] = len(plan["recompute_ratio"])
        if self.flag("recompute") or (plan is not None and "recompute_ratio" in plan):
            ratios = 1.0 if plan is None or "recompute_ratio" not in plan else plan["recompute_ratio"]
            self.put("parallel.recompute", ratios, "partition" if plan is not None else "recompute")
        ranks = self.json("config_file")
        if ranks is not None:
            counts["config_file"] = ranks.num_stages
            self.ranks(ranks)
        machines = self.old.get("machines")
        if ranks is None and "config_file" in self.old:
            self.made.get("launch", {}).pop("machines", None)  # how many there must be, the refused file would say
        if not counts and isinstance(machines, list):
            counts["machines"] = len(machines)
        if len(set(counts.values())) > 1:
            told = " and ".join(f"{name} describes {count} stages" for name, count in counts.items())
            self.document.complain(("config_file",), f"does not fit: {told}")
        num_stages = next(iter(counts.values()), None)
        if num_stages is not None:
            self.put("parallel.model_parallel_size", num_stages, next(iter(counts)))
        return num_stages

    def bert_layers(self, num_blocks: int) -> None:
        if num_blocks % 2 == 0 or num_blocks < 3:
            self.document.complain(
                ("partition",), f"adds up to {num_blocks} blocks, but a BERT of N layers has 2N + 1, an odd number"
            )
            self.made["parallel"].pop("partition")
        else:
            self.put("model.num_layers", (num_blocks - 1) // 2, "partition")

    def ranks(self, ranks: RankMap) -> None:
        if set(ranks.replicas) != {1}:
            self.put("parallel.replicas", list(ranks.replicas), "config_file")
        if ranks.depths is not None:
            self.put("parallel.schedule_options", {"depths": list(ranks.depths)}, "config_file")
        if ranks.tensor_parallel_size != 1:
            self.warn(
                "config_file",
                f"asks for mp_size {ranks.tensor_parallel_size}: vpipe has no tensor parallelism, so each "
                "replica of a stage is one rank",
            )
        machines = self.old.get("machines")
        if isinstance(machines, list) and max(ranks.order) < len(machines):
            self.put("launch.machines", [machines[rank] for rank in ranks.order], "machines")

    def json(self, name: str) -> Any:
        """The plan or the rank map that ``name`` points to; its problems are told with the others."""
        path = self.old.get(name)
        if path is None:
            return None
        if not isinstance(path, str) or not path or not path.isprintable():
            self.document.complain((name,), f"is {short(path)} but must be the path of a JSON file")
            return None
        try:
            file = self.find(path)
            return read_plan(file) if name == "partition" else read_rank_map(read_json(file), str(file))
        except ConfigError as error:
            self.document.problems += error.problems
            return None

    def find(self, path: str) -> Path:
        """Beside the YAML file, or where VPipe's own tree has it: in ``directory``, beside or above the file."""
        directory = self.old.get("directory")
        folder = self.source.parent
        folders = [folder]
        if isinstance(directory, str) and directory.isprintable():
            folders += [folder / directory, folder.parent / directory]
        files = [Path(absolute(path, each)) for each in folders]
        return next((file for file in files if os.path.isfile(file)), files[0])

    def schedule(self, num_stages: int | None) -> str:
        mode = self.old.get("sync_mode", "asp")
        if mode not in ("asp", "bsp"):
            hint = nearest(str(mode), ("asp", "bsp"))
            self.document.complain(("sync_mode",), f"is {short(mode)} but must be asp or bsp{hint}")
        if mode == "asp" and self.made["model"]["name"] in TIED:  # VPipe's stages held separate copies too
            self.put("model.extra", {**self.made["model"].get("extra", {}), "tied": False}, "sync_mode")
        macrobatch = self.flag("macrobatch")
        scheduler = "gpipe" if mode == "bsp" else "pipedream-2bw" if macrobatch else "pipedream"
        self.put("parallel.scheduler", scheduler, "macrobatch" if scheduler == "pipedream-2bw" else "sync_mode")
        if macrobatch and mode == "bsp":
            self.warn("macrobatch", "has no meaning with sync_mode bsp, which has one weight version")
        if scheduler != "pipedream" and "schedule_options" in self.made["parallel"]:
            del self.made["parallel"]["schedule_options"]
            self.warn("config_file", f"has a stage_to_depth_map, which has no meaning for {scheduler}")
        if self.flag("no_input_pipelining"):
            if scheduler == "pipedream" and num_stages is not None:
                self.put("parallel.schedule_options", {"depths": [0] * num_stages}, "no_input_pipelining")
            else:
                self.warn("no_input_pipelining", f"has no meaning for {scheduler}; use --scheduler naive to debug")
        return scheduler

    def units(self, scheduler: str, num_stages: int | None) -> None:
        """Our batch is ``num_microbatches`` of VPipe's units."""
        replicas = lcm(*self.made["parallel"].get("replicas", [1]))
        default = (num_stages or 4) if scheduler == "pipedream-2bw" else -(-UNITS // replicas) * replicas
        count = self.old.get("num_microbatches", default)
        self.put(
            "training.num_microbatches", count, "num_microbatches" if "num_microbatches" in self.old else "sync_mode"
        )
        unit = self.old.get("batch_size")
        if unit is None:
            self.document.complain(("batch_size",), "is missing: the size of one unit, such as 16")
        elif type(unit) is int and type(count) is int and 0 < unit < 2**31 and 0 < count < 2**31:
            self.put("dataset.batch_size", unit * count, "batch_size")
        else:
            self.put("dataset.batch_size", unit, "batch_size")
        for name, key in (
            ("print_frequency", "observe.log_interval"),
            ("verbose_frequency", "observe.verbose_interval"),
        ):
            every = self.old.get(name)
            if type(every) is int and type(count) is int and every > 0 and count > 0:
                self.put(key, max(1, every // count), name)
            elif name in self.old:
                self.put(key, every, name)

    def learning_rate(self) -> None:
        policy, epochs = self.old.get("learning_rate_policy"), self.old.get("epochs")
        if policy == "step" and type(epochs) is int and 0 < epochs < 10_000:
            steps = [epoch / epochs for epoch in range(STEP_EPOCHS, epochs, STEP_EPOCHS)]
            self.put("training.learning_rate_steps", steps, "learning_rate_policy")
            if not steps:
                self.warn(
                    "learning_rate_policy",
                    f"step changes the rate every {STEP_EPOCHS} epochs, so {epochs} epochs are constant",
                )
                policy = "constant"
        if policy is not None:
            self.put("training.learning_rate_policy", policy, "learning_rate_policy")
        warmup = self.old.get("lr_warmup")
        if warmup is True:
            self.warn("lr_warmup", f"true is read as training.warmup: {WARMUP}")
        if warmup is not None:
            self.put(
                "training.warmup",
                {True: WARMUP, False: 0.0}[warmup] if isinstance(warmup, bool) else warmup,
                "lr_warmup",
            )

    def momentum(self) -> None:
        """A number that only sgd has."""
        if "momentum" in self.old and self.made["training"]["optimizer"] == "sgd":
            self.put("training.optimizer_options", {"momentum": self.old["momentum"]}, "momentum")
        elif "momentum" in self.old:
            self.warn("momentum", f"has no meaning for {self.made['training']['optimizer']}")

    def container(self) -> None:
        image = self.old.get("container")
        if image is not None:
            kind = "apptainer" if str(image).endswith((".sif", ".simg")) else "docker"
            self.put("launch.container", {"kind": kind, "image": image}, "container")
            self.old_keys[("launch", "container", "image")] = ("container",)
