"""A reader's directory and shell: a copy of what a clone has, and commands that run in it one after the other.

``vpipe`` commands and blocks of Python are run by forks of one process that has imported torch already: a hundred
imports would be most of the time. Everything else is given to bash.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from docs_exceptions import PLACEHOLDERS, PROFILED, SERVERS, SHORT, SMALL
from docs_reading import ROOT

COPIED = ("configs", "docs", "examples", "scripts", "driver.py", "gpipe_runner.py", "README.md", "pyproject.toml")

FORKS = """
import json, os, sys, signal, traceback
import torch, vpipe, vpipe.cli.main, vpipe.train.trainer
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started all this in its background
            os.chdir(job["folder"])
            out = os.open(job["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0), os.dup2(out, 1), os.dup2(out, 2)
            sys.path.insert(0, job["folder"])
            if "python" in job:
                exec(compile(job["python"], job["name"], "exec"), {"__name__": "__main__", "torch": torch})
                code = 0
            else:
                sys.argv = job["words"]
                vpipe.cli.main.main()
                code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(json.dumps(child), flush=True)
    print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), flush=True)
"""


class Reader:
    """Somebody who types what the pages print."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder.parent / "out.txt"
        self.in_processes: set[str] = set()
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
        programs = folder.parent / "programs"
        programs.mkdir()
        modules = {"vpipe": "-m vpipe", "torchrun": "-m torch.distributed.run", "python": ""}
        for name, module in modules.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
            (programs / name).chmod(0o755)
        known = {key: value for key, value in os.environ.items() if not key.startswith("VPIPE_")}
        as_root = {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}
        self.environment = known | as_root | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
        }  # fmt: skip
        self.forks = subprocess.Popen(
            [sys.executable, "-c", FORKS],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        assert self.forks.stdin is not None
        self.forks.stdin.close()
        self.forks.wait(30)

    def python(self, code: str, name: str) -> tuple[int, str]:
        """(exit code, output) of a block."""
        return self._fork({"python": code, "name": name})

    def command(self, line: str) -> tuple[int, str]:
        """(exit code, output) of a line."""
        words = self._threaded(smaller(shlex.split(line)))
        if words[0] == "vpipe" and not re.search(r"[<>|$]", line):
            return self._fork({"words": words}, serves=words[1] in SERVERS or "observe.dashboard=true" in line)
        if not re.search(r"[<>|$]", line):
            line = shlex.join(words)
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        return done.returncode, done.stdout

    def _threaded(self, words: list[str]) -> list[str]:
        """A config whose ranks have been processes once is trained by threads from then on: imports are most of the time."""
        if words[:2] != ["vpipe", "train"] or {"--elastic", "--print-config", "--help"} & set(words):
            return words
        if any(word.startswith("parallel.adapt=") for word in words):
            return words  # threads take turns: their times say nothing
        if words[2] in self.in_processes:
            return [*words, "--set", "parallel.transport=inprocess"]
        self.in_processes.add(words[2])
        return words

    def _fork(self, job: dict[str, Any], serves: bool = False) -> tuple[int, str]:
        assert self.forks.stdin is not None
        assert self.forks.stdout is not None
        self.out.unlink(missing_ok=True)  # what the command before said is not read for this one's
        self.forks.stdin.write(json.dumps({"folder": str(self.folder), "out": str(self.out)} | job) + "\n")
        self.forks.stdin.flush()
        child = json.loads(self.forks.stdout.readline())
        if serves and "train" not in job["words"]:
            end = time.monotonic() + 60
            while "http://" not in self._said() and time.monotonic() < end and psutil.pid_exists(child):
                time.sleep(0.05)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGINT)
        code = json.loads(self.forks.stdout.readline())
        if serves and code == 130 and "http://" in self._said():
            code = 0  # it was interrupted, as its page says
        return code, self._said()

    def _said(self) -> str:
        return self.out.read_text(encoding="utf-8", errors="replace") if self.out.exists() else ""


def smaller(words: list[str]) -> list[str]:
    """The same command with what a reader fills in, and with what makes its run short."""
    chosen = PLACEHOLDERS | ({"CONFIG": PROFILED} if "--profile" in words else {})
    words = [chosen.get(word, word) for word in words]
    words = [f"{word}-{abs(hash(tuple(words))) % 10**6}" if word == "DIR" else word for word in words]
    program = next((word for word in words if word in ("train", "parity", "compare", "profile", "plan")), "")
    if "gpipe_runner.py" in words:
        program = "train"
    extra = [*SHORT.get(program, ())]
    if program:
        for word in words:
            for setting in SMALL.get(Path(word).name, ()):
                if program == "train" or setting.startswith("model."):
                    extra += ["--set", setting]
    return words if "--print-config" in words or "--help" in words else words + extra
