"""How pages draw actions."""

from __future__ import annotations

from typing import Any

from vpipe.observe.bubbles import CAUSES, NAMES
from vpipe.schedule.semantics import DRAWN


def look() -> dict[str, Any]:
    """Names, colours and textures of kinds; names of causes."""
    return {
        "kinds": {kind.value: trait.name for kind, trait in DRAWN.items()},
        "colours": {kind.value: trait.fills for kind, trait in DRAWN.items()},
        "textures": {kind.value: trait.texture for kind, trait in DRAWN.items() if trait.texture},
        "causes": [[cause, NAMES[cause]] for cause in CAUSES],
    }
