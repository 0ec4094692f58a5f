"""What every room's tests share."""

from __future__ import annotations

import atexit
import gc
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from programs import absent

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")  # a busy machine is no defect

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="vpipe-inductor-")
"""Kernels compiled by these tests alone: torch's own place is one for all of a user's environments."""
atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
"""A job of a background shell (``scripts/test &``) inherits that Ctrl-C is ignored, and so would all that tests start."""

Vpipe = Callable[..., "subprocess.CompletedProcess[str]"]

TOGETHER = (
    *("test_slurm.py", "test_ssh.py", "test_container.py", "test_docs_run.py", "test_house.py", "test_orion.py"),
    *("test_observe_browser.py", "test_observe_live_page.py", "test_observe_page.py", "test_observe_playground.py"),
)
"""Files whose tests share a cluster, a server, an image, a directory, syntax trees, what a compiler takes a second for, or
a browser that takes two to start, and so a worker of xdist."""


TOLD_OF_HOOKS = (2, 13)
"""From this torch on a saved tensor says whether it has hooks; before, no weight gradient waits for its W (it is right,
only not late), and torch's own schedules are dumped by other calls."""
OF_NEWER_TORCH = (
    "test_runtime_deferred.py",
    "test_text_torch.py",
    "test_a_dump_of_torch_trains",
    "test_deferred_gradients_really_wait",
    "test_without_the_check_a_lost_contribution_is_seen",
    "test_the_check_notices_a_lost_contribution",
    "test_a_wrong_formula_is_noticed",
    "test_a_tensor_that_changes_between_i_and_w_is_an_error",
    "test_a_hook_that_comes_later_is_called",
    "test_a_gradient_of_zeros_proves_nothing",
    "test_torch_still_has[_raw_saved_]",
    "test_the_order_of_units_is_the_authors",
    "test_times_are_those_that_the_layers_take",
)
"""Tests, by a part of their names, of what only newer torch does."""


SEED = "VPIPE_TEST_SEED"
os.environ.setdefault(SEED, str(int(time.time()) // 3600))
"""Draws the cases of tests that rotate; ``all`` runs every one. Another hour draws others; workers of xdist inherit it."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "rotates(keep, of=None): of its cases a run takes so many, drawn by VPIPE_TEST_SEED; of: of the cases of all tests "
        "of the file that say the same",
    )
    config.addinivalue_line(
        "markers", "needs(*programs): starts programs of the system (programs.py has their packages)"
    )


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    """Print how to draw the same cases again, and how to install what skipped tests needed."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())]
    packages = [found[1].split() for reason in reasons if (found := re.search(r"apt-get install ([\w. -]+)", reason))]
    if packages:
        names = " ".join(sorted(set().union(*packages)))
        terminalreporter.write_line(f"skipped for want of a program: {len(packages)} tests; apt-get install {names}")
    if exitstatus:
        terminalreporter.write_line(f"{SEED}={os.environ[SEED]} drew the cases of tests that rotate")


def drawn(items: list[pytest.Item], keep: int, seed: str) -> list[pytest.Item]:
    """``keep`` of the cases of one test, those first that have a value of a parameter that none before them has."""
    shuffled = sorted(items, key=lambda item: item.name)
    random.Random(f"{seed} {items[0].nodeid.partition('[')[0]}").shuffle(shuffled)
    values = {item: _values(item) for item in items}
    seen: Counter[str] = Counter()
    chosen: list[pytest.Item] = []

    def familiar(item: pytest.Item) -> tuple[int, int]:
        counts = [seen[value] for value in values[item]]
        return -counts.count(0), sum(counts)

    while shuffled and len(chosen) < keep:
        best = min(shuffled, key=familiar)
        shuffled.remove(best)
        chosen.append(best)
        seen.update(values[best])
    return chosen


def _values(item: pytest.Item) -> list[str]:
    """What a case is made of: its test, and its values; of those without a name that lasts, the case's own."""
    call = getattr(item, "callspec", None)
    parts = call.params.items() if call else ()
    named = [f"{name} {value if isinstance(value, (str, int, float)) else item.name}" for name, value in parts]
    return [item.nodeid.partition("[")[0], *named]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _rotate(config, items)
    _skip_what_is_newer(items)
    for item in items:
        if reason := absent([program for mark in item.iter_markers("needs") for program in mark.args]):
            item.add_marker(pytest.mark.skip(reason=reason))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # what starts last is short: no core idles in the end


def _rotate(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that are not drawn; whoever names a case gets it."""
    if os.environ[SEED] == "all" or any("[" in word for word in config.args):
        return
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    keep: dict[str, int] = {}
    for item in items:
        if mark := item.get_closest_marker("rotates"):
            test = f"{item.path} {mark.kwargs['of']}" if "of" in mark.kwargs else item.nodeid.partition("[")[0]
            tests[test].append(item)
            (keep[test],) = mark.args
    left: set[str] = set()
    for test, cases in tests.items():
        left |= {item.nodeid for item in cases} - {item.nodeid for item in drawn(cases, keep[test], os.environ[SEED])}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]


def _skip_what_is_newer(items: list[pytest.Item]) -> None:
    found = tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2])
    if found >= TOLD_OF_HOOKS:
        return
    for item in items:
        if any(part in item.nodeid for part in OF_NEWER_TORCH):
            item.add_marker(pytest.mark.skip(reason=f"torch {version('torch')} does not tell of saved tensors' hooks"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules, classes and thousands of cases stay to the end: who looks for garbage does not look among them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Workers are forks of one process that has imported torch."""
    import forked_python

    python = forked_python.share()
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = python


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadgroup`` with files as groups. xdist 3.8 tells groups by the end of a test's name, which pytest 9.2
    does not let it write any more: marks are accepted and do nothing, and two clusters of SLURM take the same ports."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Together(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(TOGETHER) else nodeid

    return Together(config, log)


@pytest.fixture(scope="session")
def vpipe() -> Vpipe:
    """Run the command line in a process of its own, as a user does, but for what Python imports first:
    ``vpipe("draw", "1f1b", "-p", "4", "-m", "8")``."""
    import forked_python

    def run(
        *args: str, stdin: str | None = None, timeout: float = 200, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        known = {key: value for key, value in os.environ.items() if not key.startswith("VPIPE_")}
        return subprocess.run(
            [forked_python.program(), "-m", "vpipe", *args],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=known | environment,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def documented_job() -> Callable[[Path], Path]:
    """Writes a user's own model and data set and their config into a folder, as docs/from-ourgpipe.md prints them."""

    def write(folder: Path) -> Path:
        text = (Path(__file__).parents[1] / "docs/from-ourgpipe.md").read_text(encoding="utf-8")
        for language, mark, name in (("python", "MODEL_REGISTRY", "my_model.py"), ("yaml", "plugins:", "my_job.yaml")):
            found = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
            (block,) = (each for each in found if mark in each)
            (folder / name).write_text(block)
        return folder / "my_job.yaml"

    return write
