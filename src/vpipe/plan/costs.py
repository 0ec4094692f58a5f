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
from typing import Any

from vpipe.errors import UserError, nearest
from vpipe.plan.links import Links, links_from_json
from vpipe.plan.units import format_bytes, format_seconds

FORMAT, VERSION = "vpipe-profile", 1
_OBJECTS = {"layers", "device", "links"}
"""Members of a profile that are no plain values."""
MOST_SECONDS, MOST_BYTES = 1e9, 2**53
"""Of one layer and microbatch: 30 years, and what floating numbers count exactly. More is a slip of the pen."""


@dataclass(frozen=True)
class LayerCost:
    """One layer and one microbatch. The backward is ``input_grad + weight_grad``."""

    name: str
    forward: float
    input_grad: float
    weight_grad: float
    saved_bytes: int
    """What the forward keeps for the backward, its input included where the layer saves it."""
    boundary_bytes: int
    """What crosses a boundary placed after this layer."""
    parameter_bytes: int = 0
    optimizer_bytes: int = 0
    update: float = 0.0
    """Seconds of the optimizer's update of the layer's weights: once for all units of a synchronous batch."""
    deferred_bytes: int = 0
    """What a unit holds more than it saved, between its input gradient and its weight gradient."""
    workspace_bytes: int = 0
    """What a forward or backward of the layer needs for a moment, beyond what stays."""
    spread: float = 0.0
    """Spread of the measured times, as a share of their median. Information only."""
    gradient_bytes: int | None = None
    """What comes back over the boundary: a gradient from every layer behind it that reads a value, since they are
    summed in one order wherever the model is cut; ``None``: as many bytes as went."""

    @property
    def total(self) -> float:
        return self.forward + self.input_grad + self.weight_grad

    @property
    def returned_bytes(self) -> int:
        return self.boundary_bytes if self.gradient_bytes is None else self.gradient_bytes


@dataclass(frozen=True)
class Profile:
    """The layers in order, and the machine: links between ranks, the swap lane, the runtime's own time per action."""

    layers: tuple[LayerCost, ...]
    input_bytes: int = 0
    """The model's input of one microbatch: what a segment that starts at layer 0 keeps."""
    microbatch_rows: int = 1
    link_latency: float = 0.0
    link_bandwidth: float | None = None
    """Bytes per second in each direction; ``None``: transfers take no time."""
    links: Links | None = None
    """Between every two ranks, where they were measured so; the two figures above are then of the slowest."""
    swap_bandwidth: float | None = None
    """Bytes per second of the swap lane, out and in together; ``None``: there is none."""
    action_overhead: float = 0.0
    shard_overhead: float = 0.0
    """Seconds that FSDP takes for a layer and round beyond the link's; 0: not measured."""
    shard_overhead_per_byte: float = 0.0
    """Seconds more for each byte of the layer's weights."""
    replica_overhead: float = 0.0
    """Seconds that DDP takes for a step beyond the link's; 0: not measured."""
    replica_overhead_per_byte: float = 0.0
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
                forward=layer.forward * share,
                input_grad=layer.input_grad * share,
                weight_grad=layer.weight_grad * share,
                saved_bytes=math.ceil(layer.saved_bytes * share),
                boundary_bytes=math.ceil(layer.boundary_bytes * share),
                gradient_bytes=math.ceil(layer.returned_bytes * share),
                deferred_bytes=math.ceil(layer.deferred_bytes * share),
                workspace_bytes=math.ceil(layer.workspace_bytes * share),
            )
            for layer in self.layers
        )
        return replace(self, layers=layers, input_bytes=math.ceil(self.input_bytes * share), microbatch_rows=rows)

    def slower(self, speed: float) -> Profile:
        """The same model where everything that is computed takes ``1 / speed`` of its time."""
        layers = tuple(
            replace(
                layer,
                forward=layer.forward / speed,
                input_grad=layer.input_grad / speed,
                weight_grad=layer.weight_grad / speed,
                update=layer.update / speed,
            )
            for layer in self.layers
        )
        return replace(self, layers=layers)

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
        data = json.loads(Path(path).read_text(encoding="utf-8"))
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
    reader = _Reader(where)
    layers = rest.pop("layers", None)
    if not isinstance(layers, list) or not layers:
        raise UserError(f"{where}: layers must be a list of at least one layer")
    device = rest.pop("device", {})
    if not isinstance(device, dict):
        raise UserError(f"{where}: device must be an object of facts, not {_short(repr(device))}")
    links = rest.pop("links", None)
    costs = tuple(LayerCost(**reader.fields(LayerCost, layer, f"layers[{i}].")) for i, layer in enumerate(layers))
    values = reader.fields(Profile, rest, "", without=_OBJECTS)
    measured = None if links is None else links_from_json(links, f"{where}: links")
    return Profile(layers=costs, device=device, links=measured, **values)


def _short(text: str) -> str:
    """Text of a file in an error: no more of it than a line holds."""
    return text if len(text) <= 60 else f"{text[:40]}… ({len(text)} characters)"


class _Reader:
    """Checks the members of a JSON object against a dataclass, naming file and key in every complaint."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fields(self, kind: type, data: object, prefix: str, without: set[str] | None = None) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise UserError(f"{self.where}: {prefix.rstrip('.')} must be an object, not {_short(repr(data))}")
        known = {f.name: f for f in fields(kind) if f.name not in (without or set())}
        for key in data:
            if key not in known:
                raise UserError(f"{self.where}: {prefix}{key} is not a key of a profile{nearest(key, known)}")
        found: dict[str, Any] = {}
        for name, f in known.items():
            if name in data:
                found[name] = self._value(prefix + name, str(f.type), data[name])
            elif "name" in known and name in (
                "name",
                "forward",
                "input_grad",
                "weight_grad",
                "saved_bytes",
                "boundary_bytes",
            ):
                raise UserError(f"{self.where}: {prefix}{name} is missing")
        return found

    def _value(self, key: str, kind: str, value: object) -> object:
        if kind == "str":
            if isinstance(value, str):
                return value
            raise UserError(f"{self.where}: {key} is {_short(repr(value))}; it must be text")
        if value is None and "None" in kind:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{self.where}: {key} is {_short(repr(value))}; it must be a number")
        whole = kind.startswith("int")
        positive = ("None" in kind and not whole) or key.endswith("rows")
        most = MOST_BYTES if whole or "None" in kind else MOST_SECONDS
        if not 0 <= value <= most or (positive and value == 0):
            wants = "positive" if positive else "zero or more"
            raise UserError(
                f"{self.where}: {key} is {_short(repr(value))}; it must be finite, {wants} and at most {most:g}: "
                "measure again or correct the file"
            )
        return int(value) if whole else float(value)
