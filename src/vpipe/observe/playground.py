"""The playground: a schedule, its costs and its single actions, as a page asks about them.

Everything is answered by the rooms that answer the command line: the catalogue builds, the verifier objects in its own
words, the simulator times. A program that was edited travels as torch's CSV in the address, so that a link is the whole
state and can be shared.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from vpipe.errors import UserError
from vpipe.observe import page_html, whatif
from vpipe.observe.playground_look import look
from vpipe.observe.server import answered, guarded
from vpipe.schedule import svg
from vpipe.schedule.catalog import get
from vpipe.schedule.program import Program, from_csv, to_csv
from vpipe.schedule.simulate import simulate
from vpipe.schedule.timeline import uniform
from vpipe.schedule.verify import verify

MAX_ACTIONS = 4000
MAX_TEXT = 12_000
"""Characters of an edited program: it travels in an address."""
MOST_WORDS = 12
"""Violations that are shown."""


def app(token: str, stopping: threading.Event) -> Starlette:
    """The playground's routes; ``stopping`` is for those that stream, and none here does."""

    async def index(request: Request) -> Response:
        return HTMLResponse(page_html.page("playground"))

    async def start(request: Request) -> Response:
        return JSONResponse({"schedules": whatif.choices(), **look()})

    async def play(request: Request) -> Response:
        question = dict(request.query_params)
        return await answered(lambda: answer(question))

    routes = {"/": index, "/start": start, "/play": play}
    return Starlette(routes=[Route(where, guarded(token, handler)) for where, handler in routes.items()])


def answer(question: Mapping[str, str]) -> dict[str, Any]:
    """The program as text, what the verifier says of it, and, where it runs, its timeline and figures."""
    entry = get(question.get("schedule", ""))
    times = whatif.times_of(question)
    program = _program(question, times)
    memory = whatif.time_of(question, "memory") or None
    found: dict[str, Any] = {
        "csv": to_csv(program),
        "edited": bool(question.get("rows")),
        "violations": [str(each) for each in verify(program, max_activations=memory)],
    }
    found["more"] = max(0, len(found["violations"]) - MOST_WORDS)
    found["violations"] = found["violations"][:MOST_WORDS]
    name = f"{entry.name}, edited" if found["edited"] else entry.name
    title = f"{name}: {program.num_ranks} ranks, {program.num_microbatches} microbatches"
    try:
        simulation = simulate(program, uniform(program.placement, **times), blocking=entry.blocking)
    except UserError as error:
        return found | {"title": title, "stuck": str(error)}
    return found | whatif.drawn(simulation, title) | {"svg": svg.svg(simulation, title)}


def _program(question: Mapping[str, str], times: Mapping[str, Any]) -> Program:
    """Built by the catalogue, or read from what was edited."""
    entry, (ranks, units, stages) = whatif.asked(question, MAX_ACTIONS)
    text = question.get("rows", "")
    if len(text) > MAX_TEXT:
        raise UserError(f"the edited program has {len(text)} characters; at most {MAX_TEXT} fit into an address")
    built = entry.build(ranks, units, stages, **entry.options_for(ranks, times))
    if not text:
        return built
    edited = from_csv(text, "the edited program", built.versions)
    if edited.num_ranks != built.num_ranks or edited.num_stages > built.num_stages:
        raise UserError(
            f"the edited program has {edited.num_ranks} ranks and {edited.num_stages} stages, but {entry.name} has "
            f"{built.num_ranks} and {built.num_stages}"
        )
    return Program(edited.rows, built.placement, max(built.num_microbatches, edited.num_microbatches), built.versions)
