"""The app: /v1/completions and /v1/models as OpenAI clients know them, /health, /metrics, and the page."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive

from longstride.serving.answers import Answers
from longstride.serving.choices import Choice
from longstride.serving.completions import Completion, read_completion
from longstride.serving.engine import Engine
from longstride.serving.errors import RequestError
from longstride.serving.guard import Guard
from longstride.serving.metrics import HttpCounts, make_registry, metrics_page
from longstride.serving.rendering import WholeChoice, chunks_of, to_json, whole_answer
from longstride.serving.requests import errors_of_engine, read_body
from longstride.serving.served import Served
from longstride.serving.settings import ServeSettings
from longstride.serving.views import page_router

NOWHERE = "there is nothing at this address; the API has POST /v1/completions and GET /v1/models"


def create_app(served: Served, settings: ServeSettings) -> FastAPI:
    """Returns the app, with an engine that runs from its start to its end."""
    engine = Engine(served.model, settings.streams, settings.queue, settings.exact)
    http = HttpCounts()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        except asyncio.CancelledError:  # A second Ctrl-C: nothing is waited for.
            engine.abandon()
            return
        await engine.stop()

    # No pages of FastAPI's own: its documentation loads scripts from elsewhere.
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.engine, app.state.served, app.state.http = engine, served, http
    app.add_middleware(Guard, key=settings.api_key(), allowed_hosts=settings.allowed_hosts, counts=http)
    app.add_exception_handler(RequestError, _show_error)
    app.add_exception_handler(HTTPException, _show_http_error)
    _add_completions(app, served, engine, settings)
    _add_health(app, served, engine, http)
    app.include_router(page_router(served, engine))
    return app


def _add_completions(app: FastAPI, served: Served, engine: Engine, settings: ServeSettings) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request)
        completion = read_completion(body, served.name, served.model.config, settings.overflow)
        jobs = completion.jobs()
        if len(jobs) > engine.queue + engine.places.count:
            message = (
                f"{len(jobs):,} choices are more than this server takes at once, {engine.queue + engine.places.count:,}"
            )
            raise RequestError(message, "n")
        with errors_of_engine():
            answers = engine.submit(jobs, completion.stream)
        head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
            "seed": completion.seed,
        }
        if completion.stream:
            events = _events(completion, answers, head, request.receive)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        return await _whole(completion, answers, head, request.receive)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_describe(served)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != served.name:
            raise RequestError("there is no such model", "model", code="model_not_found", status=404)
        return _describe(served)


def _add_health(app: FastAPI, served: Served, engine: Engine, http: HttpCounts) -> None:
    registry = make_registry(engine, http)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok" if engine.is_alive else "failed"}, 200 if engine.is_alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_page(registry), media_type=CONTENT_TYPE_LATEST)


def _describe(served: Served) -> dict[str, Any]:
    """A model in OpenAI's shape, with what a client of this server may want to know."""
    config = served.model.config
    return {
        "id": served.name, "object": "model", "created": served.created, "owned_by": "longstride",
        "kind": served.kind.name, "context": config.context, "max_model_len": config.context,
        "item": list(served.kind.item), "rate": served.kind.rate,
    }  # fmt: skip


@asynccontextmanager
async def _while_connected(answers: Answers, receive: Receive) -> AsyncIterator[None]:
    """Context in which a client that leaves cancels its answers."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answers.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        answers.cancel()
        watcher.cancel()
        with suppress(asyncio.CancelledError, RequestError):
            await watcher


async def _whole(completion: Completion, answers: Answers, head: dict[str, Any], receive: Receive) -> Response:
    choices = _choices(completion)
    whole = [WholeChoice(choice) for choice in choices]
    async with _while_connected(answers, receive):
        with errors_of_engine():
            async for index, piece in answers:
                async for chunk in chunks_of(choices[index], piece):
                    whole[index].add(chunk)
    if answers.is_cancelled:
        raise ClientDisconnect
    return whole_answer(head, whole, _usage(completion, choices))


async def _events(
    completion: Completion, answers: Answers, head: dict[str, Any], receive: Receive
) -> AsyncIterator[bytes]:  # fmt: skip
    """Server-sent events: a chunk for every piece, in the shape of the whole answer, and [DONE] at the end."""
    choices = _choices(completion)
    nothing = {"usage": None} if completion.includes_usage else {}
    async with _while_connected(answers, receive):
        try:
            with errors_of_engine():
                async for index, piece in answers:
                    async for chunk in chunks_of(choices[index], piece):
                        yield _event({**head, "choices": [chunk], **nothing})
        except RequestError as error:
            yield _event(error.body())
            return
        if completion.includes_usage:
            yield _event({**head, "choices": [], "usage": _usage(completion, choices)})
        yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % to_json(content)


def _choices(completion: Completion) -> list[Choice]:
    jobs = completion.jobs()
    return [Choice(index, job.prompt, completion.echo, completion.likely) for index, job in enumerate(jobs)]


def _usage(completion: Completion, choices: list[Choice]) -> dict[str, int]:
    prompt, made = sum(map(len, completion.prompts)), sum(choice.size for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


async def _show_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error.response()


async def _show_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = NOWHERE if error.status_code == 404 else str(error.detail)
    return RequestError(message, status=error.status_code, headers=error.headers).response()
