"""The picture of a simulated program as PDF or PNG, for papers and slides, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vpipe.errors import UserError
from vpipe.schedule.semantics import NAMES, TRAITS
from vpipe.schedule.simulate import Simulation

ROW = 0.55
"""Height of a rank's line in centimetres."""


def save(simulation: Simulation, path: Path, title: str | None, width: float, font: str | None) -> None:
    """Write the picture, ``width`` centimetres wide; the file's ending says the form."""
    try:
        import matplotlib
    except ImportError:
        raise UserError(
            f"{path.suffix[1:]} needs matplotlib ('pip install matplotlib'); svg and tex do without"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import font_manager, pyplot

    if font is not None and font not in font_manager.get_font_names():
        known = ", ".join(sorted(font_manager.get_font_names())[:8])
        raise UserError(f"--font {font!r} is not on this machine; among those here are {known}")
    height = len(simulation.spans) * ROW + (2.1 if title is not None else 1.6)
    wanted: dict[Any, Any] = {"font.size": 7, "hatch.linewidth": 0.3} | ({"font.family": font} if font else {})
    with pyplot.rc_context(wanted):
        figure, axes = pyplot.subplots(figsize=(width / 2.54, height / 2.54), layout="constrained")
        _draw(simulation, axes)
        if title is not None:
            axes.set_title(title, loc="left", fontsize=8)
        figure.savefig(path, dpi=300)
        pyplot.close(figure)


def _draw(simulation: Simulation, axes: Any) -> None:
    from matplotlib.patches import Patch

    seen: dict[str, Patch] = {}
    origin = min((row[0].begin for row in simulation.spans if row), default=0.0)
    scale = axes.figure.get_size_inches()[0] * 2.54 / max(simulation.makespan, 1e-12)
    for rank, row in enumerate(simulation.spans):
        for span in row:
            kind, length = str(span.action.kind), span.end - span.begin
            if length <= 0:
                axes.plot([span.begin - origin] * 2, [rank - 0.45, rank + 0.45], color="0.25", linewidth=0.8)
                continue
            style: dict[str, Any] = {
                "facecolor": TRAITS[span.action.kind].fills[0],
                "hatch": TRAITS[span.action.kind].hatch or None,
                "edgecolor": "0.7",
            }
            axes.barh(rank, length, 0.9, span.begin - origin, linewidth=0.25, **style)
            seen.setdefault(kind, Patch(linewidth=0.25, label=NAMES[span.action.kind], **style))
            number = span.action.microbatch
            if number >= 0 and length * scale > 0.14 * len(str(number)) + 0.05:
                middle = span.begin - origin + length / 2
                axes.text(middle, rank, str(number), ha="center", va="center", fontsize=5)
    axes.set_yticks(range(len(simulation.spans)), [f"rank {rank}" for rank in range(len(simulation.spans))])
    axes.set_xlim(0, simulation.makespan)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    handles = [seen[str(kind)] for kind in NAMES if str(kind) in seen]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=len(handles), frameon=False)
