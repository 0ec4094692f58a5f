"""The emulated accelerator for the tests of this room: built once, visible while one of them runs, reset after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "runtime"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first of them may have to wait for the compiler. They need a process without other tests: autograd counts
    the devices once, at the first backward of a process."""
    here = [item for item in items if "emulated" in item.path.parts]
    for item in here:
        if len(here) < len(items):
            item.add_marker(
                pytest.mark.skip(reason="other tests are in this process: 'pytest tests/emulated' runs them")
            )
        elif item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(420))


@pytest.fixture(scope="session")
def emulated() -> Any:
    """The module of the device; the test is skipped where it cannot be built."""
    from emulated_build import CannotBuild

    try:
        import emulated_device
    except CannotBuild as reason:
        pytest.skip(str(reason))
    emulated_device.hide()
    return emulated_device


@pytest.fixture(autouse=True)
def device(emulated: Any) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with emulated.visible():
        yield
        emulated.reset()
    torch.set_num_threads(threads)


@pytest.fixture(params=["as-is", "lazy", "delays", "harsh"])
def mode(request: pytest.FixtureRequest, emulated: Any) -> str:
    """Each way in which streams may run; no single one shows every forgotten wait."""
    emulated.settings(**emulated.MODES[request.param])
    return str(request.param)
