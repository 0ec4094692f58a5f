"""Writes the course as HTML with the playground inside every page: python docs/learn/pages.py course

Markdown cannot hold a frame (where it is shown on the web frames are removed), so the pages that you read there only
say what to set. These do not: each link *Play with it* becomes the static playground itself, set as the page asks. The
folder needs no server and no vpipe; open ``index.html``.
"""

from __future__ import annotations

import shutil
import sys
from base64 import b64encode
from hashlib import sha256
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import offline  # noqa: E402

PLAYGROUND = "playground.html"
STYLE = """
:root { color-scheme: light dark; }
body { font: 17px/1.6 system-ui, "DejaVu Sans", sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; }
img { max-width: 100%; background: #fff; }
pre { overflow-x: auto; padding: .6rem .8rem; border: 1px solid #8886; border-radius: 6px; font-size: 14px; }
code { overflow-wrap: anywhere; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { padding: .2rem .7rem; border: 1px solid #8886; }
iframe { box-sizing: border-box; width: 100%; height: 75vh; min-height: 30rem; border: 1px solid #8886; }
"""
SCRIPT = """
addEventListener("message", (event) => {
  const frame = [...document.querySelectorAll("iframe")].find((each) => each.contentWindow === event.source);
  const high = event.data?.playgroundHeight;
  if (frame && Number.isFinite(high)) frame.style.height = high + 2 + "px";
});
"""
"""A frame is as high as what it holds: the playground tells it, since a page from disk may not look into another."""


def html_name(target: str) -> str:
    """Of a page, or of an address that leads to one of these pages; others stay."""
    return target.replace("README.md", "index.md").replace(".md", ".html")


def page(source: Path) -> str:
    """One page: links lead to HTML, and a link to the playground is the playground."""
    top = "../" if source.parent != HERE else ""
    markdown = MarkdownIt("commonmark").enable("table")
    tokens: list[Token] = []
    frame = ""
    for token in markdown.parse(source.read_text(encoding="utf-8")):
        tokens.append(token)
        if token.type == "inline":
            frame = _link(token, source.parent, top)
        elif frame:  # the paragraph has ended
            html = f'<iframe src="{escape(frame)}" title="playground" loading="lazy"></iframe>\n'
            tokens.append(Token("html_block", "", 0, content=html))
            frame = ""
    body = markdown.renderer.render(tokens, markdown.options, {})
    title = next(token.content for token in tokens if token.type == "inline")
    digest = b64encode(sha256(SCRIPT.encode()).digest()).decode()
    sources = "img-src 'self' file:; frame-src 'self' file:; style-src 'unsafe-inline'"
    policy = f"default-src 'none'; {sources}; script-src 'sha256-{digest}'"
    language = "zh" if top else "en"
    return (
        f'<!doctype html>\n<html lang="{language}">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n{body}<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _link(inline: Token, folder: Path, top: str) -> str:
    """Turn the links of a paragraph; the address of the playground if it has one."""
    frame, kept, dropping = "", [], False
    children = inline.children or []
    for number, token in enumerate(children):
        if token.type == "link_open":
            said, target = children[number + 1].content, str(token.attrs["href"])
            if said.startswith(PLAYGROUND + "#"):
                frame = top + said
                token.attrs["href"] = frame
            elif (folder / target.partition("#")[0]).resolve().is_relative_to(HERE):
                token.attrs["href"] = html_name(target)
            else:
                dropping = True  # a page that is not in the folder: its words stay
        if not (dropping and token.type in ("link_open", "link_close")):
            kept.append(token)
        dropping = dropping and token.type != "link_close"
    inline.children = kept
    return frame


def write(folder: Path, most: offline.Most | None = None) -> list[Path]:
    """All pages in both languages, their pictures, and the playground with programs of up to ``most``."""
    written = []
    for source in sorted(HERE.rglob("*.md")):
        target = folder / html_name(str(source.relative_to(HERE)))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page(source), encoding="utf-8")
        written.append(target)
    pictures = shutil.ignore_patterns("*.sh", "*.csv")
    shutil.copytree(HERE / "pictures", folder / "pictures", ignore=pictures, dirs_exist_ok=True)
    (folder / PLAYGROUND).write_text(offline.page(most), encoding="utf-8")
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("python docs/learn/pages.py FOLDER")
    folder = Path(sys.argv[1])
    pages = write(folder)
    sys.stdout.write(f"wrote {len(pages)} pages: open {folder / 'index.html'} in a browser, no server is needed\n")
