"""How the playground draws actions, with a server and without."""

from __future__ import annotations

from typing import Any

from vpipe.observe.bubbles import CAUSES, NAMES
from vpipe.schedule import draw, svg


def look() -> dict[str, Any]:
    """Names, colours and textures of kinds; names of causes."""
    return {
        "kinds": {kind.value: name for kind, name in draw.NAMES.items()},
        "colours": {kind.value: fills for kind, fills in svg.FILLS.items()},
        "textures": {kind.value: lines for kind, lines in svg.TEXTURES.items()},
        "causes": [[cause, NAMES[cause]] for cause in CAUSES],
    }
