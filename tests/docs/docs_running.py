"""A reader's directory and shell: a copy of what a clone has, and commands that run in it one after the other.

Python is one that has imported torch already (``forked_python.py``): a hundred imports would be most of the time.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

from docs_exceptions import PLACEHOLDERS, PROFILED, SERVERS, SHORT, SMALL
from docs_reading import ROOT

import forked_python

COPIED = ("configs", "docs", "examples", "scripts", "driver.py", "gpipe_runner.py", "README.md", "pyproject.toml")


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
        address = folder.parent / "socket"
        modules = {"vpipe": ("-m", "vpipe"), "torchrun": ("-m", "torch.distributed.run"), "python": ()}
        for name, words in modules.items():
            forked_python.write(programs / name, address, *words)
        known = {key: value for key, value in os.environ.items() if not key.startswith("VPIPE_")}
        as_root = {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}
        self.environment = known | as_root | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHON_EXEC": str(programs / "python"),  # what torchrun starts
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
        }  # fmt: skip
        self.forks = forked_python.start(address, "torch.distributed.fsdp", "transformers")

    def close(self) -> None:
        self.forks.terminate()
        self.forks.wait(30)

    def python(self, code: str, name: str) -> tuple[int, str]:
        """(exit code, output) of a block."""
        return self._run(["python", "-c", f"import torch\nexec(compile({code!r}, {name!r}, 'exec'))"])

    def command(self, line: str) -> tuple[int, str]:
        """(exit code, output) of a line."""
        words = self._threaded(smaller(shlex.split(line)))
        if words[0] == "vpipe" and not re.search(r"[<>|$]", line):
            return self._run(words, serves=words[1] in SERVERS)
        return self._run(["bash", "-c", line if re.search(r"[<>|$]", line) else shlex.join(words)])

    def _threaded(self, words: list[str]) -> list[str]:
        """A config whose ranks have been processes once is trained by threads from then on: these take a third of the time.
        Of the configs that are not profiled, this hour draws half whose ranks are threads from the beginning."""
        if (
            words[0] != "vpipe"
            or words[1] not in ("train", "parity", "compare")
            or {"--elastic", "--print-config", "--help"} & set(words)
        ):
            return words
        if any(word.startswith("parallel.adapt=") for word in words):
            return words  # threads take turns: their times say nothing
        if words[2] in self.in_processes or not in_processes(words[2]):
            return [*words, "--set", "parallel.transport=inprocess"]
        self.in_processes.add(words[2])
        return words

    def _run(self, words: list[str], serves: bool = False) -> tuple[int, str]:
        with self.out.open("w") as out:  # what the command before said is not read for this one's
            running = subprocess.Popen(
                words,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if serves:
            end = time.monotonic() + 60
            while "http://" not in self._said() and time.monotonic() < end and running.poll() is None:
                time.sleep(0.05)
            running.send_signal(signal.SIGINT)
        code = running.wait(300)
        if serves and code == 130 and "http://" in self._said():
            code = 0  # it was interrupted, as its page says
        return code, self._said()

    def _said(self) -> str:
        return self.out.read_text(encoding="utf-8", errors="replace") if self.out.exists() else ""


def in_processes(config: str) -> bool:
    """Whether the ranks of a config are processes once in this run."""
    seed = os.environ["VPIPE_TEST_SEED"]
    return config == PROFILED or seed == "all" or random.Random(f"{seed} {config}").random() < 0.5


def smaller(words: list[str]) -> list[str]:
    """The same command with what a reader fills in, and with what makes its run short."""
    chosen = PLACEHOLDERS | ({"CONFIG": PROFILED} if "--profile" in words else {})
    words = [chosen.get(word, word) for word in words]
    words = [f"{word}-{abs(hash(tuple(words))) % 10**6}" if word == "DIR" else word for word in words]
    program = next((word for word in words if word in ("train", "parity", "compare", "profile", "plan", "build")), "")
    if "gpipe_runner.py" in words:
        program = "train"
    extra = [*SHORT.get(program, ())]
    if program:
        for word in words:
            for setting in SMALL.get(Path(word).name, ()):
                if program == "train" or setting.startswith("model."):
                    extra += ["--set", setting]
    return words if "--print-config" in words or "--help" in words else words + extra
