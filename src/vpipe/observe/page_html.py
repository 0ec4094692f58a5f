"""One HTML file: the page's own scripts and styles from ``page/``, and the data of a run.

The file opens from disk, offline, for years: nothing is fetched. What a run contains is hostile until proven otherwise
(a layer may be called ``</script>``), so data travels as JSON in which ``<``, ``>`` and ``&`` are escaped, the page
sets text only as text, and a content security policy allows exactly the scripts that are written here.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

DRAWING = ("dom.js", "timeline.js", "charts.js", "panels.js")
PAGES: dict[str, tuple[str, ...]] = {
    "run": (*DRAWING, "curves.js", "app.js"),
    "vpipe": (*DRAWING, "curves.js", "app.js", "whatif.js"),
    "runs": ("dom.js", "runs.js"),
    "two runs": (*DRAWING, "pair.js"),
    "playground": (*DRAWING, "playground.js"),
    "comparison": ("dom.js", "charts.js", "compare.js"),
}
"""Title → scripts. ``vpipe`` is the live page of a run, ``two runs`` lie side by side."""


def page(name: str, data: Mapping[str, Any] | None = None) -> str:
    """One of ``PAGES`` with its data inside; without any, it asks its own server."""
    title, style = str((data or {}).get("title", name)), part("style.css")
    code = '"use strict";\n' + "\n".join(map(part, PAGES[name])) + "\nstart();\n"
    embedded = "" if data is None else f'<script type="application/json" id="data">{inert(data)}</script>\n'
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src 'sha256-{digest(code)}'",
            "style-src 'unsafe-inline'",
            "img-src data:",
            "connect-src 'self'" if data is None else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        '<div id="app"><noscript>This page draws itself with JavaScript, which is switched off.</noscript></div>\n'
        f"{embedded}<script>{code}</script>\n</body>\n</html>\n"
    )


def part(name: str) -> str:
    return (files("vpipe.observe") / "page" / name).read_text(encoding="utf-8")


def digest(code: str) -> str:
    return b64encode(sha256(code.encode()).digest()).decode()


def inert(data: Mapping[str, Any]) -> str:
    """JSON that no HTML parser takes for anything else."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
