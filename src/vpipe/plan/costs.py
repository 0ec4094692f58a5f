"""What each layer costs, and what the machine between the layers can do.

A profile is the only thing the planner knows of a model. ``plan.profile`` measures one; PipeDream's graph text gives
one (``graph_text``); a person may write one by hand. Times are seconds of one microbatch, sizes are bytes of one
microbatch.

    input ─▶ [layer 0] ─▶ [layer 1] ─▶ … ─▶ [layer L-1] ─▶ loss
    cut 0            cut 1         cut 2

``cut_bytes[i]`` is what crosses a boundary placed before layer ``i``. In a model with skips it is the sum of all
tensors that some later layer still reads, so a partition pays for every edge that it cuts.

Words: docs/glossary.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from vpipe.errors import UserError
from vpipe.plan.links import Links, links_from_json
from vpipe.plan.units import format_bytes, format_seconds
from vpipe.records import EXACT, parsed

FORMAT, VERSION = "vpipe-profile", 1
_OBJECTS = {"layers", "device", "links"}
"""Members of a profile that are no plain values."""
Seconds = Annotated[float, Ge(0), Le(1e9)]
"""At most 30 years: more is a slip of the pen, as are sizes and rates beyond what floating numbers count exactly."""
Bytes = Annotated[int, Ge(0), Le(2**53)]
Rate = Annotated[float, Gt(0), Le(2**53)]
_COMPUTED = ("forward", "input_grad", "weight_grad")
_OF_ROWS = ("saved_bytes", "boundary_bytes", "deferred_bytes", "workspace_bytes")


@dataclass(frozen=True)
class LayerCost:
    """One layer and one microbatch. The backward is ``input_grad + weight_grad``."""

    __pydantic_config__ = EXACT
    name: str
    forward: Seconds
    input_grad: Seconds
    weight_grad: Seconds
    saved_bytes: Bytes
    """What the forward keeps for the backward, its input included where the layer saves it."""
    boundary_bytes: Bytes
    """What crosses a boundary placed after this layer."""
    parameter_bytes: Bytes = 0
    optimizer_bytes: Bytes = 0
    update: Seconds = 0.0
    """Seconds of the optimizer's update of the layer's weights: once for all units of a synchronous batch."""
    deferred_bytes: Bytes = 0
    """What a unit holds more than it saved, between its input gradient and its weight gradient."""
    workspace_bytes: Bytes = 0
    """What a forward or backward of the layer needs for a moment, beyond what stays."""
    spread: Seconds = 0.0
    """Spread of the measured times, as a share of their median. Information only."""
    gradient_bytes: Bytes | None = None
    """What comes back over the boundary: the gradients of what went; ``None``: as many bytes as went."""

    @property
    def total(self) -> float:
        return self.forward + self.input_grad + self.weight_grad

    @property
    def returned_bytes(self) -> int:
        return self.boundary_bytes if self.gradient_bytes is None else self.gradient_bytes


@dataclass(frozen=True)
class Profile:
    """The layers in order, and the machine: links between ranks, the swap lane, the runtime's own time per action."""

    __pydantic_config__ = EXACT
    layers: tuple[LayerCost, ...]
    input_bytes: Bytes = 0
    """The model's input of one microbatch: what a segment that starts at layer 0 keeps."""
    microbatch_rows: Annotated[int, Gt(0)] = 1
    link_latency: Seconds = 0.0
    link_bandwidth: Rate | None = None
    """Bytes per second in each direction; ``None``: transfers take no time."""
    links: Links | None = None
    """Between every two ranks, where they were measured so; the two figures above are then of the slowest."""
    swap_bandwidth: Rate | None = None
    """Bytes per second of the swap lane, out and in together; ``None``: there is none."""
    action_overhead: Seconds = 0.0
    shard_overhead: Seconds = 0.0
    """Seconds that FSDP takes for a layer and round beyond the link's; 0: not measured."""
    shard_overhead_per_byte: Seconds = 0.0
    """Seconds more for each byte of the layer's weights."""
    replica_overhead: Seconds = 0.0
    """Seconds that DDP takes for a step beyond the link's; 0: not measured."""
    replica_overhead_per_byte: Seconds = 0.0
    """Seconds more for each byte of weights."""
    model: str = ""
    """What was profiled, for telling one model's profile from another's."""
    device: Mapping[str, str | float] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def cut_bytes(self) -> tuple[int, ...]:
        """``cut_bytes[i]`` crosses a boundary before layer ``i``; index 0 is the model's input."""
        return (self.input_bytes, *(layer.boundary_bytes for layer in self.layers))

    @cached_property
    def back_bytes(self) -> tuple[int, ...]:
        """``back_bytes[i]`` are the gradients that cross a boundary before layer ``i``, on their way back."""
        return (self.input_bytes, *(layer.returned_bytes for layer in self.layers))

    @property
    def on_device(self) -> bool:
        """Whether an accelerator was measured: it has memory of its own."""
        return "memory_bytes" in self.device

    def scaled(self, rows: int) -> Profile:
        """The same model with microbatches of ``rows`` rows: times, activations and boundaries in proportion."""
        share = rows / self.microbatch_rows
        layers = tuple(
            replace(
                layer,
                **{name: getattr(layer, name) * share for name in _COMPUTED},
                **{name: math.ceil(getattr(layer, name) * share) for name in _OF_ROWS},
                gradient_bytes=math.ceil(layer.returned_bytes * share),
            )
            for layer in self.layers
        )
        return replace(self, layers=layers, input_bytes=math.ceil(self.input_bytes * share), microbatch_rows=rows)

    def slower(self, speed: float) -> Profile:
        """The same model where everything that is computed takes ``1 / speed`` of its time."""
        names = (*_COMPUTED, "update")
        layers = (replace(layer, **{name: getattr(layer, name) / speed for name in names}) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    def to_json(self) -> dict[str, Any]:
        head = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _OBJECTS}
        if self.links is not None:
            head["links"] = self.links.to_json()
        layers = [{f.name: getattr(layer, f.name) for f in fields(layer)} for layer in self.layers]
        return {"format": FORMAT, "version": VERSION, **head, "device": dict(self.device), "layers": layers}

    def save(self, path: str | Path) -> None:
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    def table(self) -> str:
        """The layers as a person reads them, those that cost the same in one row, and one line on the machine."""
        alike: dict[LayerCost, list[int]] = {}
        for index, layer in enumerate(self.layers):
            alike.setdefault(replace(layer, name=""), []).append(index)
        head = ("layers", "name", "forward", "input-grad", "weight-grad", "update", "saved", "boundary")
        rows = [
            (
                _listed(indices),
                self.layers[indices[0]].name + (f" (and {len(indices) - 1} like it)" if len(indices) > 1 else ""),
                *map(format_seconds, (layer.forward, layer.input_grad, layer.weight_grad, layer.update)),
                *map(format_bytes, (layer.saved_bytes, layer.boundary_bytes)),
                *map(format_bytes, (layer.parameter_bytes, layer.optimizer_bytes)),
            )
            for layer, indices in alike.items()
        ]
        return align([(*head, "parameters", "optimizer"), *rows], left={0, 1}) + "\n" + self._machine()

    def _machine(self) -> str:
        link = "unlimited" if self.link_bandwidth is None else f"{format_bytes(self.link_bandwidth)}/s"
        swap = "none" if self.swap_bandwidth is None else f"{format_bytes(self.swap_bandwidth)}/s"
        return (
            f"microbatch of {self.microbatch_rows} rows; link {link} after {format_seconds(self.link_latency)}; "
            f"swap {swap}; {format_seconds(self.action_overhead)} per action" + self._spread_of_links()
        )

    def _spread_of_links(self) -> str:
        """The quickest and the slowest, where links were measured one by one."""
        links = self.links
        if links is None or links.bandwidth is None or links.latency is None or not links.pairs:
            return ""
        bandwidth, latency = links.bandwidth, links.latency
        ordered = sorted(links.pairs, key=lambda pair: bandwidth[pair[0]][pair[1]])
        told = (
            f"{format_bytes(bandwidth[a][b])}/s after {format_seconds(latency[a][b])} from rank {a} to {b}"
            for a, b in (ordered[-1], ordered[0])
        )
        return f"\nlinks between {links.num_ranks} ranks: {' (quickest), '.join(told)} (slowest)"


def write_text(path: str | Path, text: str) -> None:
    """Write a file that the user has named."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _listed(indices: Sequence[int]) -> str:
    """``[1, 2, 3, 7]`` → ``1-3, 7``; of many parts only the ends."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(parts if len(parts) < 4 else [*parts[:2], "…", parts[-1]])


def align(rows: Sequence[tuple[str, ...]], left: set[int]) -> str:
    """Columns, right-aligned except those in ``left``."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def load_profile(path: str | Path) -> Profile:
    """Reads ``profile.json``; every fault names the file and the key."""
    where = str(path)
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"), parse_float=_number)
    except FileNotFoundError:
        raise UserError(f"{where}: there is no such profile; make one with `vpipe profile CONFIG -o {where}`") from None
    except OSError as error:
        raise UserError(f"{where}: the profile cannot be read: {error.strerror}") from None
    except RecursionError:
        raise UserError(f"{where}: not a profile, since it is nested too deeply") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise UserError(f"{where}: not a profile, since it is not JSON ({_short(str(error))})") from None
    return profile_from_json(data, where)


def profile_from_json(data: object, where: str = "profile") -> Profile:
    """The profile that a JSON value describes; ``where`` is what errors call it."""
    if not isinstance(data, dict) or data.get("format", FORMAT) != FORMAT:
        raise UserError(f"{where}: not a profile; expected a JSON object with format {FORMAT!r}")
    if data.get("version", VERSION) != VERSION:
        raise UserError(
            f"{where}: a profile of version {_short(repr(data['version']))}, but this vpipe reads version {VERSION}; "
            "measure again with 'vpipe profile'"
        )
    rest = {key: value for key, value in data.items() if key not in ("format", "version")}
    layers, device, links = rest.pop("layers", None), rest.pop("device", {}), rest.pop("links", None)
    if not isinstance(layers, list) or not layers:
        raise UserError(f"{where}: layers must be a list of at least one layer")
    if not isinstance(device, dict):
        raise UserError(f"{where}: device must be an object of facts, not {_short(repr(device))}")
    try:
        if "memory_bytes" in device:
            device["memory_bytes"] = parsed(int, device["memory_bytes"], "device.memory_bytes")
        costs = tuple(parsed(LayerCost, layer, f"layers[{i}]") for i, layer in enumerate(layers))
        plain = parsed(Profile, rest | {"layers": []})
    except ValueError as error:
        raise UserError(f"{where}: {error}; measure again or correct the file") from None
    measured = None if links is None else links_from_json(links, f"{where}: links")
    return replace(plain, layers=costs, device=device, links=measured)


def _number(text: str) -> float:
    """A size may be written as 1e6 or 4096.0 too."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= 2**53 else value


def _short(text: str) -> str:
    """Text of a file in an error: no more of it than a line holds."""
    return text if len(text) <= 60 else f"{text[:40]}… ({len(text)} characters)"
