"""A rank that ends waits for its own threads: one that came back from the store later would abort the process."""

from __future__ import annotations

import threading
import time
from typing import Any

from vpipe.runtime.ranks.failure import Cause
from vpipe.runtime.ranks.watchdog import DONE, MOMENT, Watchdog


class Slow:
    """A board whose answers one waits for until ``answers`` is set."""

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()
        self.lost = False

    def beat(self, text: str) -> None:
        """Heard at once."""

    def read(self) -> Cause | None:
        self.asked.set()
        self.answers.wait()
        if self.lost:
            raise RuntimeError("Connection reset by peer")
        return None

    def beat_of(self, rank: int) -> str:
        return DONE

    def acknowledge(self) -> int:
        return 1


def watching(board: Any) -> Watchdog:
    """The watchdog of a rank that does not keep the store, whose thread waits for an answer."""
    found = Watchdog(board, rank=1, num_ranks=2, silence=60, keeper=0, report_fd=None)
    found.start()
    assert board.asked.wait(60)
    return found


def test_the_end_waits_for_a_thread_that_waits_for_the_store() -> None:
    board = Slow()
    watchdog = watching(board)
    ending = threading.Thread(target=watchdog.finish)
    ending.start()
    ending.join(MOMENT + 0.5)
    assert ending.is_alive(), "the thread is still in the store"
    board.answers.set()
    ending.join(60)
    assert not ending.is_alive()
    assert not any(thread.is_alive() for thread in watchdog._threads)


def test_a_store_that_goes_while_a_rank_finishes_is_no_failure(monkeypatch: Any) -> None:
    """Whoever keeps the store waits for the others ten seconds and not for ever."""
    left: list[Cause] = []
    monkeypatch.setattr(Watchdog, "leave", lambda self, cause: left.append(cause))
    board = Slow()
    board.lost = True
    watchdog = watching(board)
    board.answers.set()  # the thread loses the store, and leaves in a moment
    time.sleep(MOMENT / 3)
    watchdog.finish()
    assert not left
