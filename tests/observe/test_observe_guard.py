"""Strangers at the page's port: half-sent requests go, whole ones are answered, and the run is not their process."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from observe_runs import MakeRun

pytest.importorskip("uvicorn", reason="the live page needs vpipe[dashboard]")
from vpipe.observe import guard
from vpipe.observe.dashboard import Dashboard, PageProcess

HALF = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "


def connect(port: int, sent: bytes) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), timeout=10)
    found.sendall(sent)
    return found


def is_closed(connection: socket.socket) -> bool:
    """Waits until the server ends the connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def answers(url: str) -> int:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return int(reply.status)


def test_a_flood_of_half_sent_requests_costs_only_themselves(make_run: MakeRun) -> None:
    with Dashboard(make_run("1f1b", 2, 4)) as page:
        before = len(os.listdir("/proc/self/fd"))
        flood = [connect(page.port, HALF) for _ in range(3 * guard.MAX_WAITING)]
        assert answers(page.url) == 200, "a whole request is served while others are half sent"
        assert all(is_closed(each) for each in flood[: 2 * guard.MAX_WAITING - 1]), "the oldest go first"
        here = len(os.listdir("/proc/self/fd")) - before - len(flood)
        assert here <= guard.MAX_WAITING + 2, "the server holds no more than it allows"
        for each in flood:
            each.close()


@pytest.mark.parametrize("sent", [HALF, b""], ids=["half", "nothing"])
def test_a_visitor_who_was_not_read_yet_is_not_sent_away(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """On a busy machine more connections were accepted at once than may wait, and the oldest of them, unread, went."""
    monkeypatch.setattr(guard, "PATIENCE_SECONDS", 60.0)
    with Dashboard(make_run("1f1b", 2, 4)) as page:
        visitor = connect(page.port, b"")
        flood = [connect(page.port, sent) for _ in range(3 * guard.MAX_WAITING)]
        assert answers(page.url) == 200, "the server has accepted all of them"
        visitor.sendall(f"GET /?{page.url.partition('?')[2]} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        assert visitor.recv(12) == b"HTTP/1.1 200"
        for each in flood:
            each.close()


def test_those_who_say_nothing_are_bounded_too(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(guard, "HEADER_SECONDS", 60.0)
    monkeypatch.setattr(guard, "MAX_UNREAD", 40)
    with Dashboard(make_run("1f1b", 2, 4)) as page:
        flood = [connect(page.port, b"") for _ in range(50)]
        assert all(is_closed(each) for each in flood[:10])
        assert answers(page.url) == 200
    for each in flood:
        each.close()


def test_a_request_has_a_deadline(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.2)
    with Dashboard(make_run("1f1b", 2, 4)) as page:
        assert is_closed(connect(page.port, HALF))
        assert is_closed(connect(page.port, b""))
        assert answers(page.url) == 200


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"POST /?token=%s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999999999\r\n\r\n", (b"405", b"413")),
        (b"GET /?token=%s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10\r\n\r\n", (b"413",)),
        (b"GET /?token=%s HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n", (b"413",)),
        (b"GET /?token=%s HTTP/1.1\r\nX: " + b"a" * 100_000, (b"400", b"")),
    ],
)
def test_bodies_and_endless_headers_are_refused(make_run: MakeRun, sent: bytes, answer: tuple[bytes, ...]) -> None:
    with Dashboard(make_run("1f1b", 2, 4)) as page:
        connection = connect(page.port, sent.replace(b"%s", page.token.encode()))
        got = b""
        try:
            while part := connection.recv(4096):
                got += part
        except ConnectionResetError:
            pass
        assert got.split(b" ")[1] in answer if got else b"" in answer


@pytest.mark.slow
def test_a_run_s_page_is_a_process_of_its_own_that_ends_with_it(make_run: MakeRun) -> None:
    run = make_run("1f1b", 2, 4)
    page, file = PageProcess(run), run / "page.url"
    assert page.pid != os.getpid()
    url = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    until = time.monotonic() + 60
    while True:
        try:
            assert answers(url) == 200
            break
        except OSError:
            assert time.monotonic() < until
    command = Path(f"/proc/{page.pid}/cmdline").read_bytes()
    told = command + page.where.encode()
    assert url.partition("token=")[2].encode() not in told, (
        "every user of the machine can read arguments, and many logs"
    )
    page.stop()
    assert not file.exists()
    page._process.wait(200)


def test_ctrl_c_waits_for_the_server(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket was closed while it still served, and it told so with a traceback."""
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    page = Dashboard(make_run()).start()
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        page.wait()
    page.stop()
    while any(thread.name == "vpipe-dashboard" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert told == []
