"""The page and the endpoints that only it uses, under /page.

The page's files are read when the module is imported; nothing else is served from the disk but bundled samples and what the
model's folder says about it.
"""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from longstride.common.checks import short_repr, whole_number
from longstride.serving.about import bundled_samples, describe_model
from longstride.serving.engine import Engine
from longstride.serving.errors import RequestError
from longstride.serving.requests import errors_of_engine, read_body
from longstride.serving.scores import look_at, passes, score_pass
from longstride.serving.served import Served
from longstride.training.metrics import NAME

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
MOST_BYTES = 2**16
"""The most bytes that are scored or looked at."""
MOST_REQUESTS = 16
"""Requests that may wait for the model at a time."""
LIKELY = 16
"""How many of the likely bytes are told."""
DIGITS = 6


def _read_files() -> dict[str, tuple[bytes, str]]:
    """Returns the content and the type of the page's files by name."""
    every = files("longstride.serving").joinpath("page").iterdir()
    suffixes = {file: file.name[file.name.rfind(".") :] for file in every}
    return {file.name: (file.read_bytes(), TYPES[suffix]) for file, suffix in suffixes.items() if suffix in TYPES}


FILES = _read_files()


class Desk:
    """The answers to the page's requests. Everything that runs the model goes through the engine, one part at a time."""

    def __init__(self, served: Served, engine: Engine) -> None:
        self.served, self.engine = served, engine
        self.model, self.config = served.model, served.model.config
        self.waiting = 0
        self.samples: list[dict[str, Any]] | None = None
        self.described: tuple[tuple[int, int], dict[str, Any]] | None = None
        """When the run's metrics had changed, and what was said then."""

    def about(self) -> dict[str, Any]:
        served, stamp = self.served, metrics_stamp(self.served.run)
        if self.described is None or self.described[0] != stamp:
            described = describe_model(served.name, self.config, served.kind, served.card, served.run)
            self.described = stamp, described | {"most_bytes": self.most_bytes}
        return self.described[1]

    @property
    def most_bytes(self) -> int:
        return self.config.context if self.served.kind.has_items else MOST_BYTES

    def sample_list(self) -> dict[str, Any]:
        if self.samples is None:
            self.samples = bundled_samples(self.config, self.served.kind)
        return {"samples": self.samples}

    async def scores(self, given: dict[str, Any], request: Request) -> dict[str, Any]:
        """The bits of every byte."""
        check_names(given, "bytes")
        data = self.read_bytes(given)
        bits: list[float | None] = []
        async with self.place():
            for part in passes(self.config, len(data)):
                if await request.is_disconnected():
                    raise RequestError("the client has left", status=499)
                scored = await self.engine.run(partial(score_pass, self.model, data, part))
                bits += [round(value, DIGITS) if isfinite(value) else None for value in scored.tolist()]
        known = [value for value in bits if value is not None]
        return {"bits": bits, "bits_per_byte": round(sum(known) / len(known), DIGITS) if known else None}

    async def look(self, given: dict[str, Any], request: Request) -> dict[str, Any]:
        """The prediction of one byte: what was likely, and the attention weights."""
        check_names(given, "bytes", "position", "layers")
        data = self.read_bytes(given)
        position = read_whole("position", given.get("position"), len(data) - 1)
        layers = given.get("layers")
        if layers is not None:
            if not isinstance(layers, list) or not 0 < len(layers) <= self.config.layers:
                raise RequestError(f"layers must be a list of 1 to {self.config.layers} layers, or left out", "layers")
            layers = [read_whole("layers", layer, self.config.layers - 1) for layer in layers]
        async with self.place():
            try:
                seen = await self.engine.run(partial(look_at, self.model, data, position, layers))
            except ValueError as error:
                message = str(error).removeprefix("look: ").removeprefix("inspect_attention: ")
                raise RequestError(message, "layers") from None
        chances = np.nan_to_num(seen.probabilities)
        order = np.argsort(-chances, kind="stable")
        known = chances[chances > 0]
        return {
            "position": position,
            "byte": data[position],
            "probability": float(chances[data[position]]),
            "rank": int(np.flatnonzero(order == data[position])[0]) + 1,
            "entropy": round(float(-(known * np.log2(known)).sum()), DIGITS),
            "likely": [[byte, float(chances[byte])] for byte in order[:LIKELY].tolist()],
            "first": seen.first,
            "layers": seen.layers,
            "levels": base64.b64encode(seen.levels.tobytes()).decode(),
            "maxima": [[float(f"{value:.{DIGITS}g}") for value in heads] for heads in seen.maxima.tolist()],
        }

    def read_bytes(self, given: dict[str, Any]) -> bytes:
        values = given.get("bytes")
        if not isinstance(values, list) or not values:
            raise RequestError("bytes must be a list of at least one whole number from 0 to 255", "bytes")
        if len(values) > self.most_bytes:
            raise RequestError(f"bytes has {len(values):,}; give at most {self.most_bytes:,}", "bytes")
        if not all(type(value) is int and 0 <= value <= 255 for value in values):
            raise RequestError("bytes must be whole numbers from 0 to 255", "bytes")
        return bytes(values)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place among those who wait for the model."""
        if self.waiting >= MOST_REQUESTS:
            message = f"{self.waiting} requests are waiting already; try again"
            raise RequestError(message, status=429, headers={"Retry-After": "1"})
        self.waiting += 1
        try:
            with errors_of_engine():
                yield
        finally:
            self.waiting -= 1


def page_router(served: Served, engine: Engine) -> APIRouter:
    """Returns the routes of the page."""
    router, desk = APIRouter(include_in_schema=False), Desk(served, engine)

    @router.get("/")
    async def index() -> Response:
        return send_file("index.html")

    @router.get("/static/{name}")
    async def file(name: str) -> Response:
        return send_file(name)

    @router.get("/page/about")
    def about() -> Response:
        return send(desk.about())

    @router.get("/page/samples")
    def sample_list() -> Response:
        return send(desk.sample_list())

    @router.post("/page/scores")
    async def scores(request: Request) -> Response:
        try:
            return send(await desk.scores(await read_body(request), request))
        except RequestError as error:
            return error.response()

    @router.post("/page/look")
    async def look(request: Request) -> Response:
        try:
            return send(await desk.look(await read_body(request), request))
        except RequestError as error:
            return error.response()

    return router


def metrics_stamp(run: Path | None) -> tuple[int, int]:
    """Changes whenever the metrics of a run do."""
    try:
        status = (run / NAME).stat() if run else None
    except OSError:
        status = None
    return (status.st_mtime_ns, status.st_size) if status else (0, 0)


def send(answer: dict[str, Any]) -> Response:
    return Response(json.dumps(answer, allow_nan=False), 200, HEADERS, "application/json")


def send_file(name: str) -> Response:
    if name not in FILES:
        return RequestError("there is no such file", status=404).response()
    content, media_type = FILES[name]
    return Response(content, 200, HEADERS, media_type)


def check_names(given: dict[str, Any], *names: str) -> None:
    for name in given:
        if name not in names:
            raise RequestError(f"there is no field {short_repr(name)}; the fields are {', '.join(names)}")


def read_whole(name: str, value: object, most: int) -> int:
    if type(value) is int and value > most:  # Before the limit of all integers, which says less.
        raise RequestError(f"{name} must be at most {most:,}, got {short_repr(value)}", name)
    try:
        return whole_number("page", name, value, 0)
    except ValueError as error:
        raise RequestError(str(error).removeprefix("page: "), name) from None
