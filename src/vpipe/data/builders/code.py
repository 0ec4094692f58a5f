"""``code``: the documented functions of Python's standard library, in CodeSearchNet's fields and layout.

Lists of tokens, which no reader here asks for, are left out.

A real program corpus that is on every machine that can run this program: about 6,700 functions. Files, not functions,
are dealt to train, valid and test, so that a method and its twin two lines below are never on both sides.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import platform
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vpipe.data import tokenizer
from vpipe.data.builders import BuiltData, Request, digest, letters, shuffled
from vpipe.data.files import find_files, read_text
from vpipe.errors import UserError

_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_SHARES = (("test", 0.1), ("valid", 0.1), ("train", 0.8))

Function = ast.FunctionDef | ast.AsyncFunctionDef


def write(folder: Path, request: Request) -> BuiltData:
    """``python/final/jsonl/<split>/python_<split>_0.jsonl.gz`` and a byte-level BPE tokenizer of the training split."""
    root = request.source or Path(sysconfig.get_path("stdlib"))
    files = {file.relative_to(root).as_posix(): file for file in find_files(root, (".py",), _LEFT_OUT) if file != root}
    names = list(files)
    by_file: list[list[dict[str, Any]]] = []
    total = 0
    for done, name in enumerate(shuffled(names, request.seed), start=1):
        room = None if request.limit is None else request.limit - total
        if functions := list(_functions(files[name], name, request.source is None))[:room]:
            by_file.append(functions)
            total += len(functions)
        request.progress(total, request.limit) if request.limit else request.progress(done, len(names))
        if total == request.limit:
            break
    if len(by_file) < len(_SHARES):
        raise UserError(
            f"{root} has documented Python functions in {len(by_file)} files, but train, valid and test need one each; "
            "name a larger --source or raise --limit"
        )
    splits = _deal(by_file, total)
    for split, functions in splits.items():
        _write_split(folder, split, functions)
    tokenizer.train("bpe", (function["original_string"] for function in splits["train"])).save(
        str(folder / tokenizer.FILE_NAME), pretty=False
    )
    counts = {split: len(splits[split]) for split in ("train", "valid", "test")}
    texts = (function["original_string"] for functions in by_file for function in functions)
    own = request.source is None
    return BuiltData(
        name=f"standard library of Python {platform.python_version()}"
        if own
        else f"the Python files of the folder {root.name}",
        licence="PSF-2.0 (Python Software Foundation Licence)" if own else "that of the source files",
        sha256=digest(texts),
        counts={**counts, "characters": sum(len(f["original_string"]) for functions in by_file for f in functions)},
    )


def _deal(by_file: list[list[dict[str, Any]]], total: int) -> dict[str, list[dict[str, Any]]]:
    """Whole files to test and valid until each has its tenth, the rest to train. ``by_file`` is shuffled already."""
    splits: dict[str, list[dict[str, Any]]] = {split: [] for split, _ in _SHARES}
    rest = list(by_file)
    for split, share in _SHARES[:-1]:
        while len(rest) > 1 and (not splits[split] or len(splits[split]) + len(rest[-1]) <= share * total):
            splits[split] += rest.pop()
    apart = {letters(function["code"]) for functions in splits.values() for function in functions}
    splits["train"] = [
        function for functions in rest for function in functions if letters(function["code"]) not in apart
    ]
    for split, functions in splits.items():
        for function in functions:
            function["partition"] = split
    return splits


def _write_split(folder: Path, split: str, functions: list[dict[str, Any]]) -> None:
    place = folder / "python" / "final" / "jsonl" / split
    place.mkdir(parents=True)
    text = "".join(json.dumps(function, ensure_ascii=False) + "\n" for function in functions)
    with (
        (place / f"python_{split}_0.jsonl.gz").open("wb") as raw,
        gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as packed,
    ):
        packed.write(text.encode("utf-8", "backslashreplace"))


def _functions(file: Path, name: str, own: bool) -> Iterator[dict[str, Any]]:
    """The functions of one file that have a docstring, as records of CodeSearchNet."""
    source = read_text(file) if not own else file.read_text(encoding="utf-8", errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # a template or an example of a mistake: the standard library holds a few
    sha = hashlib.sha1(source.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()
    lines = re.split(r"(?<=\n)", re.sub(r"\r\n?", "\n", source))  # Python's: a form feed or U+0085 ends none
    version = ".".join(map(str, sys.version_info[:3]))
    for qualified, node in _walk(tree, ""):
        docstring = ast.get_docstring(node)
        if not docstring or node.end_lineno is None:
            continue
        text = "".join(lines[node.lineno - 1 : node.end_lineno])
        code = _dedent(text, node.col_offset)
        yield {
            "repo": "python/cpython" if own else file.parent.name,
            "path": f"Lib/{name}" if own else name,
            "func_name": qualified,
            "original_string": code,
            "language": "python",
            "code": code,
            "docstring": docstring,
            "sha": sha,
            "url": f"https://github.com/python/cpython/blob/v{version}/Lib/{name}#L{node.lineno}-L{node.end_lineno}"
            if own
            else "",
            "partition": "",
        }


def _walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
        if isinstance(child, Function | ast.ClassDef):
            yield from _walk(child, f"{prefix}{child.name}.")
        elif not isinstance(child, ast.expr):  # no function is defined inside an expression
            yield from _walk(child, prefix)


def _dedent(text: str, columns: int) -> str:
    """A method at the left margin. Lines of a string that stand further left keep their place."""
    cut = [line[columns:] if not line[:columns].strip() else line for line in re.split(r"(?<=\n)", text)]
    return "".join(cut).rstrip()
