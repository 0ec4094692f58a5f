"""What the pages print: commands, and blocks of Python and YAML, each with its page and line.

A command is a line of a block (fenced, or indented by four) or a piece of inline code that begins with a program's name.
A piece of inline code with a program's name alone, or with an ``…``, is a mention and no command.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

PROGRAMS = (
    "vpipe|python3?|pytest|torchrun|mpirun|srun|sbatch|pip|sh|bash|eval|tensorboard|wandb|ssh|kubectl|scripts/[a-z]+"
)
COMMAND = re.compile(rf"^(?:[A-Z_]+=\S+ +)*(?:{PROGRAMS})(?= |$)")
FENCE = re.compile(r"^( *)```(\S*)\s*$")
SHELLS = ("", "sh", "bash", "console")
FILE = re.compile(r"`([\w-]+\.(?:py|ya?ml))`[^`.]*:\s*$")
"""A page that names a file and ends its sentence with a colon means the block that follows."""
COMMENT = re.compile(r"\s+# .*$|\s{2,}# ?.*$")


@dataclass(frozen=True)
class Block:
    """Lines that belong together: run one after the other, or written into ``file`` where the page names one."""

    page: str
    line: int
    language: str
    """``sh`` for commands, else what the fence says."""
    lines: tuple[str, ...]
    comments: tuple[str, ...] = ()
    """Of commands, what the page says behind each."""
    file: str = ""

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Everything that a page asks a reader to type, in its order."""
    name, lines = str(page.relative_to(ROOT)), page.read_text(encoding="utf-8").splitlines()
    found: list[Block] = []
    number = 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if fence:
            end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == "```")
            body = [line.removeprefix(fence[1]) for line in lines[number + 1 : end]]
            found += _fenced(name, number, fence[2], body, lines)
            number = end + 1
        elif _indented(lines, number):
            end = number
            while end < len(lines) and lines[end].startswith("    "):
                end += 1
            found += _shell(name, number, [line.strip() for line in lines[number:end]])
            number = end
        else:
            found += _inline(name, number, lines[number])
            number += 1
    return found


def _indented(lines: list[str], number: int) -> bool:
    line = lines[number]
    return line.startswith("    ") and COMMAND.match(line.strip().removeprefix("$ ")) is not None


def _fenced(page: str, number: int, language: str, body: list[str], lines: list[str]) -> list[Block]:
    if language in SHELLS:
        return _shell(page, number + 1, body)
    before = " ".join(lines[max(0, number - 3) : number])
    file = FILE.search(before)
    return [Block(page, number + 1, language, tuple(body), file=file[1] if file else "")]


def _shell(page: str, number: int, body: list[str]) -> list[Block]:
    """The commands among lines, some of which are what they print."""
    commands, comments = [], []
    waiting = ""
    for line in body:
        line = f"{waiting}\n{line}" if waiting else line.removeprefix("$ ")
        if not COMMAND.match(line) or "─" in line or "…" in COMMENT.sub("", line):
            continue
        if not _whole(line):
            waiting = line
            continue
        waiting = ""
        command = COMMENT.sub("", line)
        commands.append(command.rstrip())
        comments.append(line[len(command) :].strip().lstrip("#").strip())
    return [Block(page, number + 1, "sh", tuple(commands), tuple(comments))] if commands else []


def _whole(line: str) -> bool:
    try:
        shlex.split(COMMENT.sub("", line))
    except ValueError:
        return False
    return True


def _inline(page: str, number: int, line: str) -> list[Block]:
    found = []
    for code in re.findall(r"`([^`]+)`", line):
        if COMMAND.match(code) and "…" not in code and _whole(code) and len(shlex.split(code)) > _mention(code):
            found.append(Block(page, number + 1, "sh", (code,), ("",)))
    return found


def _mention(code: str) -> int:
    """How many words are a name only: ``vpipe train``, ``scripts/test``."""
    return 2 if code.startswith("vpipe") else 1
