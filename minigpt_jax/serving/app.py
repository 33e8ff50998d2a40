"""The server's addresses, and how HTTP carries what is asked and answered. Framework-free.

What a request means is decided in api.py, what is answered in responses.py; here are bytes, status codes, keys and
clients that leave. A client that leaves frees its row.
"""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from minigpt_jax.errors import UserError
from minigpt_jax.serving.batcher import Batcher, Ticket
from minigpt_jax.serving.chat_page import chat_page
from minigpt_jax.serving.fields import RequestError, parse_json
from minigpt_jax.serving.requests import Event, Failed, Finished, QueueFull
from minigpt_jax.serving.served_model import Job, ServedModel

RETRY_AFTER_SECONDS = 1
"""When a client that found the queue full is told to come again."""

DISCARDED = 16
"""Times the largest body that is read and thrown away: many clients look for an answer only when they have sent all."""

CLIENT_LEFT = 499
"""Status of an answer that nobody gets, as nginx has it."""

_log = logging.getLogger(__name__)

_Events = asyncio.Queue[tuple[int, Event]]


def make_app(
    model: ServedModel, batcher: Batcher, *, api_key: str | None, hosts: frozenset[str] | None, max_request_bytes: int
) -> FastAPI:
    """The application.

    Args:
        model: what is served.
        batcher: what answers.
        api_key: what every request under /v1 has to bring; None lets everybody in.
        hosts: names by which the server may be addressed; None for any.
        max_request_bytes: of a body.
    """
    app = FastAPI(title="minigpt", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(_Guard, hosts=hosts)
    _add_errors(app)
    html, policy = chat_page()
    created = int(time.time())
    about = {"id": model.name, "object": "model", "created": created, "owned_by": "minigpt"}

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(html, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", **asdict(batcher.load)}

    api = APIRouter(prefix="/v1", dependencies=[] if api_key is None else [Depends(_key_check(api_key))])

    @api.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [about]}

    @api.get("/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        model.require_named(name)
        return about

    @api.post("/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answered(request, batcher, model.chat, max_request_bytes)

    @api.post("/completions")
    async def completion(request: Request) -> Response:
        return await _answered(request, batcher, model.completion, max_request_bytes)

    app.include_router(api)
    return app


# --- One request ---


async def _answered(
    request: Request, batcher: Batcher, understand: Callable[[Any], Job], max_request_bytes: int
) -> Response:
    body = await _body(request, max_request_bytes)
    # A long conversation takes a while to encode, and the others' pieces must not wait for it.
    job = await asyncio.to_thread(lambda: understand(_parsed(body)))
    events: _Events = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def note(number: int, event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, (number, event))

    try:
        ticket = batcher.submit(job.requests, note)
    except QueueFull as full:
        raise RequestError(
            str(full), code="queue_full", status=429, headers={"Retry-After": str(RETRY_AFTER_SECONDS)}
        ) from full
    except UserError as error:
        raise RequestError(str(error), code="invalid_value") from error
    if job.streams:
        return _Stream(_sent_events(job, events), ticket)
    return await _whole_answer(request, job, events, ticket)


async def _body(request: Request, most: int) -> bytes:
    """The body, of which no more is kept than is allowed."""
    body, length = bytearray(), 0
    async for part in request.stream():
        length += len(part)
        if length <= most:
            body += part
        elif length > DISCARDED * most:
            break
    if length <= most:
        return bytes(body)
    raise RequestError(
        f"the body has more than {most} bytes; shorten it, or start the server with a larger --max-request-bytes",
        code="request_too_large",
        status=413,
    )


def _parsed(body: bytes) -> Any:
    try:
        return parse_json(body.decode("utf-8"))
    except ValueError as error:
        raise RequestError(f"the body cannot be read as JSON: {error}", code="invalid_json") from error


async def _told(job: Job, events: _Events) -> AsyncIterator[list[dict[str, Any]]]:
    """The pieces of the answer as they come, until every choice has finished.

    Raises:
        RequestError: one came to nothing.
    """
    going = len(job.requests)
    while going:
        number, event = await events.get()
        if isinstance(event, Failed):
            raise RequestError(f"the answer failed: {event.message}", code="generation_failed", status=500)
        going -= isinstance(event, Finished)
        yield job.answer.take(number, event)


async def _whole_answer(request: Request, job: Job, events: _Events, ticket: Ticket) -> Response:
    async def collect() -> None:
        async for _ in _told(job, events):
            pass

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    collecting, leaving = asyncio.create_task(collect()), asyncio.create_task(leave())
    try:
        await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=CLIENT_LEFT)
        collecting.result()
    finally:
        ticket.cancel()
        collecting.cancel()
        leaving.cancel()
    return JSONResponse(job.answer.whole())


async def _sent_events(job: Job, events: _Events) -> AsyncIterator[str]:
    """The answer as server-sent events."""
    try:
        for piece in job.answer.opening():
            yield _sent(piece)
        async for pieces in _told(job, events):
            for piece in pieces:
                yield _sent(piece)
        for piece in job.answer.ending():
            yield _sent(piece)
    except RequestError as error:
        yield _sent(error.body)
    except Exception:
        # The status has been sent; what is left is to say so, and not to end as if all were well.
        _log.exception("an answer failed")
        yield _sent(_unexpected().body)
    yield "data: [DONE]\n\n"


def _sent(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


class _Stream(StreamingResponse):
    """Server-sent events; however they end, nothing is computed for them any more."""

    def __init__(self, content: AsyncIterator[str], ticket: Ticket):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ticket.cancel()


# --- Who may ask ---


def _key_check(api_key: str) -> Callable[[Request], Awaitable[None]]:
    expected = api_key.encode("utf-8")

    async def require_key(request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # Header values arrive as Latin-1; a comparison that takes equally long everywhere tells nothing of the key.
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip(" \t").encode("latin-1"), expected):
            raise RequestError(
                "this server asks for its API key: Authorization: Bearer KEY",
                code="invalid_api_key",
                status=401,
                headers={"WWW-Authenticate": "Bearer"},
            )

    return require_key


class _Guard:
    """Turns away what a page of another site sent through a visitor's browser.

    A page can point a name of its own at this machine (DNS rebinding), so on a loopback address only the known names
    are served. And it can post without reading the answer, which browsers tell by Sec-Fetch-Site.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None):
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._objection(Request(scope))) is not None:
            await JSONResponse(error.body, error.status)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _objection(self, request: Request) -> RequestError | None:
        if self._hosts is not None:
            name = _host_name(request.headers.get("host", ""))
            if name not in self._hosts:
                return RequestError(
                    f"this server is not {name!r}; address it as {' or '.join(sorted(self._hosts))}", code="wrong_host"
                )
        if request.method == "POST" and request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return RequestError("pages of other sites cannot ask this server", code="cross_site", status=403)
        return None


def _host_name(header: str) -> str:
    """The name in a Host header, without the port."""
    name = header.lower()
    return name.partition("]")[0].removeprefix("[") if name.startswith("[") else name.partition(":")[0]


# --- Errors ---


def _add_errors(app: FastAPI) -> None:
    async def refused(_: Request, error: RequestError) -> Response:
        return JSONResponse(error.body, error.status, error.headers)

    async def not_here(request: Request, error: HTTPException) -> Response:
        whys = {404: f"there is nothing at {request.url.path}", 405: f"{request.url.path} takes another method"}
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        said = RequestError(whys.get(error.status_code, error.detail), code=code, status=error.status_code)
        return JSONResponse(said.body, error.status_code, error.headers)

    async def left(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_LEFT)

    async def unexpected(_: Request, __: Exception) -> Response:
        # What it was is in the server's log, where it is raised again.
        error = _unexpected()
        return JSONResponse(error.body, error.status)

    app.exception_handler(RequestError)(refused)
    app.exception_handler(HTTPException)(not_here)
    app.exception_handler(ClientDisconnect)(left)
    app.exception_handler(Exception)(unexpected)


def _unexpected() -> RequestError:
    return RequestError("something went wrong in the server; its log says what", code="internal_error", status=500)
