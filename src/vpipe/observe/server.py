"""The live page: a small server on the loopback interface.

The browser opens one stream of server-sent events. It gets the whole once and then what has changed, whenever the files
of the run have. A browser that loses the connection comes back by itself and gets the whole again; a run that has ended
is simply a run that no longer changes. Reading and simulating happen in a worker thread, never more often than they
take: a page must not slow the training it shows. A directory of runs is a list; any of them can be opened, any two laid
side by side.

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
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from vpipe.errors import UserError
from vpipe.observe import gallery, guard, page_html, whatif
from vpipe.observe.watcher import Watcher

TICK = 0.1
"""Seconds after which a stream notices that the server stops."""
POLL = 0.3
"""Seconds between two looks at the files."""
HOSTS = ("127.0.0.1", "localhost", "[::1]")

Handler = Callable[[Request], Awaitable[Response]]


class Served:
    """The run directory that is served, or the directory of runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watchers: dict[str, Watcher] = {}
        self.streams = 0

    @property
    def is_run(self) -> bool:
        return gallery.is_run(self._path) or not gallery.runs(self._path)

    def watcher(self, name: str) -> Watcher:
        """Of the only run, or of the one that is named; only names of the list are ever looked up."""
        path = self._path if self.is_run else gallery.runs(self._path).get(name)
        if path is None:
            raise UserError(f"there is no run {name[:80]!r} in {self._path}")
        return self._watchers.setdefault(str(path), Watcher(path))


def app(path: str | Path, token: str, stopping: threading.Event | None = None) -> Starlette:
    """The server's routes; ``token`` must come with every request. Streams end when ``stopping`` is set."""
    ended = stopping or threading.Event()
    place = Served(Path(path))

    async def index(request: Request) -> Response:
        named = {"run", "a"} & set(request.query_params)
        if place.is_run or named:
            return HTMLResponse(page_html.page("two runs" if "a" in named else "vpipe"))
        return HTMLResponse(page_html.page("runs"))

    async def listed(request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(gallery.lines, Path(path)))

    async def schedules(request: Request) -> Response:
        return JSONResponse(whatif.choices())

    async def ask(request: Request) -> Response:
        question = dict(request.query_params)
        return await answered(lambda: whatif.answer(question, place.watcher(question.get("run", ""))))

    async def data(request: Request) -> Response:
        return await answered(lambda: place.watcher(request.query_params.get("run", "")).whole())

    async def events(request: Request) -> Response:
        if place.streams >= guard.MAX_STREAMS:
            return PlainTextResponse(f"503: {guard.MAX_STREAMS} pages follow this run already\n", 503)
        try:
            watcher = place.watcher(request.query_params.get("run", ""))
        except UserError as error:
            return PlainTextResponse(f"404: {error}\n", 404)
        return StreamingResponse(_stream(watcher, place, ended), media_type="text/event-stream")

    routes = {"/": index, "/events": events, "/data": data, "/runs": listed, "/whatif": ask, "/schedules": schedules}
    return Starlette(routes=[Route(where, guarded(token, handler)) for where, handler in routes.items()])


def guarded(token: str, handler: Handler) -> Handler:
    """A handler that refuses requests without the token."""

    async def check(request: Request) -> Response:
        host = request.headers.get("host", "").rsplit(":", 1)[0]
        given = request.query_params.get("token", "")
        if host not in HOSTS or not secrets.compare_digest(given.encode(), token.encode()):
            response: Response = PlainTextResponse(
                "403: open the address that vpipe printed; it carries a token\n", 403
            )
        elif int(request.headers.get("content-length") or "0") or "transfer-encoding" in request.headers:
            response = PlainTextResponse("413: nothing here takes a body\n", 413)
        else:
            response = await handler(request)
        response.headers["cache-control"] = "no-store"
        response.headers["x-content-type-options"] = "nosniff"
        response.headers["x-frame-options"] = "DENY"
        return response

    return check


async def answered(question: Callable[[], dict[str, Any]]) -> Response:
    """JSON; what does not fit is said in its ``error``."""
    try:
        return JSONResponse(await asyncio.to_thread(question))
    except UserError as error:
        return JSONResponse({"error": str(error)})


async def _stream(watcher: Watcher, place: Served, ended: threading.Event) -> AsyncIterator[str]:
    place.streams += 1
    try:
        async for text in _messages(watcher, ended):
            yield text
    finally:
        place.streams -= 1


async def _messages(watcher: Watcher, ended: threading.Event) -> AsyncIterator[str]:
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
        rest = max(POLL, 2 * watcher.cost)


def _event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
