"""Draws docs/planner.svg from a real plan: python docs/planner_picture.py

A transformer of 24 blocks with an embedding and a head, on 4 ranks under PipeDream's asynchronous schedule: early
stages hold more units and more weight versions, so they recompute more and hold fewer layers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vpipe.plan.costs import LayerCost, Profile
from vpipe.plan.memory import Choice
from vpipe.plan.planner import Plan, plan
from vpipe.plan.units import format_bytes, format_seconds

MIB = 1 << 20
COLOURS = {
    "weights": "#35618f",
    "gradients": "#5f8fbf",
    "optimizer": "#93b8d8",
    "kept": "#d98c3f",
    "segment_inputs": "#f0c08a",
    "recomputed": "#b5533c",
    "swapped": "#6f9f5f",
    "buffers": "#999999",
}
CHOICES = {Choice.KEEP: "#d98c3f", Choice.RECOMPUTE: "#b5533c", Choice.SWAP: "#6f9f5f"}


def example() -> Plan:
    block = LayerCost("block", 10e-3, 10e-3, 10e-3, 48 * MIB, 4 * MIB, 7 * MIB, 14 * MIB)
    embedding = LayerCost("embedding", 2e-3, 0.0, 2e-3, 4 * MIB, 4 * MIB, 30 * MIB, 60 * MIB)
    head = LayerCost("head", 14e-3, 14e-3, 14e-3, 100 * MIB, 0, 30 * MIB, 60 * MIB)
    blocks = [replace(block, name=f"block{i}") for i in range(24)]
    profile = Profile((embedding, *blocks, head), input_bytes=8192, microbatch_rows=8)
    return plan(profile, 4, num_microbatches=8, memory="0.95GiB", schedule="pipedream")


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{colour}" stroke="#ffffff" stroke-width="0.7"/>'
    )


def draw(found: Plan) -> str:
    cap = found.memory[0]
    left, wide, row = 70.0, 640.0, 62.0
    parts = [
        text(left, 20, f"{found.schedule}, {found.num_ranks} ranks of {format_bytes(cap)}: layers and memory", size=14)
    ]
    cell = wide / max(found.layout.counts)
    for stage, choices in enumerate(found.layout.choices):
        top = 36 + stage * row
        terms = found.prediction.stage_memory[stage]
        parts.append(text(left - 8, top + 15, f"stage {stage}", "end"))
        parts += [box(left + i * cell, top, cell, 20, CHOICES[choice]) for i, choice in enumerate(choices)]
        parts.append(text(left + wide + 8, top + 15, format_seconds(found.prediction.stage_times[stage])))
        x = left
        for name, colour in COLOURS.items():
            width = wide * getattr(terms, name) / cap
            parts.append(box(x, top + 24, width, 20, colour))
            x += width
        parts.append(text(left + wide + 8, top + 39, format_bytes(terms.total)))
    bottom = 36 + found.layout.num_stages * row
    x = left + wide
    line = f'<line x1="{x}" y1="30" x2="{x}" y2="{bottom - 12}" stroke="#000000" stroke-dasharray="4 3"/>'
    parts.append(line)
    for index, (name, colour) in enumerate(COLOURS.items()):
        x, y = left + (index % 4) * 165, bottom + 4 + (index // 4) * 20
        parts += [box(x, y, 12, 12, colour), text(x + 17, y + 11, name.replace("_", " "))]
    note = "upper bar: layers (kept, recomputed); lower bar: bytes, the dashed line is the cap"
    parts.append(text(left, bottom + 62, note))
    size = f'width="800" height="{bottom + 74:.0f}"'
    style = 'font-family="sans-serif" style="background:#ffffff"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


if __name__ == "__main__":
    Path(__file__).with_name("planner.svg").write_text(draw(example()))
