"""The live page: a small server on the loopback interface.

The browser opens one stream of server-sent events. It gets the whole once and then what has changed, whenever the files
of the run have. A browser that loses the connection comes back by itself and gets the whole again; a run that has ended
is simply a run that no longer changes. Reading and simulating happen in a worker thread, never more often than they
take: a page must not slow the training it shows.

Only this machine is listened to, and every request must carry the token of the printed address: other users of the
machine, and pages of other sites that try to reach a local port, get 403. A Host header that names another place is
refused as well (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from vpipe.errors import UserError
from vpipe.observe import page_html, whatif
from vpipe.observe.payload import payload, recorded
from vpipe.observe.rundir import open_run

TICK = 0.1
"""Seconds after which a stream notices that the server stops."""
POLL = 0.5
"""Seconds between two looks at the files."""
LIVE_STEPS = 4
"""Steps of a running job that are sent with each change; the page remembers older ones."""
HOSTS = ("127.0.0.1", "localhost", "[::1]")
STATIC = ("facts", "config", "kinds", "colours", "causes", "title", "format")
"""What does not change while a run goes on."""

Handler = Callable[[Request], Awaitable[Response]]


class Watcher:
    """A run directory as messages; the newest is shared by all browsers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: Any = None
        self._whole: dict[str, Any] = {}
        self.cost = 0.0

    def stamp(self) -> Any:
        """Changes whenever one of the files does."""
        names = ["run.json", "metrics.jsonl", "summary.json", "plan.json"]
        files = [self._path / name for name in names] + sorted((self._path / "events").glob("rank*[0-9].jsonl"))
        found = []
        for file in files:
            try:
                stat = file.stat()
                found.append((file.name, stat.st_mtime_ns, stat.st_size))
            except OSError:
                continue
        return tuple(found)

    def whole(self) -> dict[str, Any]:
        """Everything, computed once per change."""
        with self._lock:
            stamp = self.stamp()
            if stamp != self._seen or not self._whole:
                began = perf_counter()
                run = open_run(self._path)
                last = None if run.finished or not self._whole else LIVE_STEPS
                self._whole = payload(run, recorded(run, last))
                self._seen, self.cost = stamp, perf_counter() - began
            return self._whole

    def change(self) -> dict[str, Any]:
        return {key: value for key, value in self.whole().items() if key not in STATIC}


def app(path: str | Path, token: str, stopping: threading.Event | None = None) -> Starlette:
    """The server's routes; ``token`` must come with every request. Streams end when ``stopping`` is set."""
    ended = stopping or threading.Event()
    watcher = Watcher(Path(path))

    def guarded(handler: Handler) -> Handler:
        async def check(request: Request) -> Response:
            host = request.headers.get("host", "").rsplit(":", 1)[0]
            given = request.query_params.get("token", "")
            if host not in HOSTS or not secrets.compare_digest(given.encode(), token.encode()):
                return PlainTextResponse("403: open the address that vpipe printed; it carries a token\n", 403)
            response = await handler(request)
            response.headers["cache-control"] = "no-store"
            response.headers["x-content-type-options"] = "nosniff"
            response.headers["x-frame-options"] = "DENY"
            return response

        return check

    async def index(request: Request) -> Response:
        return HTMLResponse(page_html.live())

    async def schedules(request: Request) -> Response:
        return JSONResponse(whatif.choices())

    async def ask(request: Request) -> Response:
        try:
            found = await asyncio.to_thread(whatif.answer, dict(request.query_params))
        except UserError as error:
            return JSONResponse({"error": str(error)})
        return JSONResponse(found)

    async def events(request: Request) -> Response:
        return StreamingResponse(_stream(watcher, ended), media_type="text/event-stream")

    routes = {"/": index, "/events": events, "/whatif": ask, "/schedules": schedules}
    return Starlette(routes=[Route(where, guarded(handler)) for where, handler in routes.items()])


async def _stream(watcher: Watcher, ended: threading.Event) -> AsyncIterator[str]:
    """The whole, then changes, with a sign of life in between."""
    yield "retry: 1000\n\n"
    name, seen, quiet, rest = "whole", None, 0.0, 0.0
    while not ended.is_set():
        await asyncio.sleep(TICK)
        quiet, rest = quiet + TICK, rest - TICK
        if quiet > 10:
            quiet = 0.0
            yield ": still here\n\n"
        if rest > 0:
            continue
        stamp = watcher.stamp()
        if stamp != seen:
            try:
                found = await asyncio.to_thread(watcher.whole if name == "whole" else watcher.change)
                yield _event(name, found)
                name, seen, quiet = "change", stamp, 0.0
            except UserError as error:
                yield _event("problem", str(error))
        rest = max(POLL, 4 * watcher.cost)


def _event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
