"""The guard before the app: host, origin and key of a request, the size of its body, and headers that protect the page.

A browser that shows another site must not be able to use the server. That site may send requests (refused by their Origin),
or resolve a name of its own to this machine's address (refused by their Host).
"""

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import time
from collections.abc import Sequence
from contextlib import suppress

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longstride.serving.errors import RequestError, stopping
from longstride.serving.metrics import HttpCounts

LOG = logging.getLogger("longstride")
LARGEST_BODY = 2**23
"""The most bytes of a request."""
REFUSAL_SECONDS = 1.0
"""Seconds in which a client must take in that the server stops. One that reads nothing would keep it from that."""
HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?")
"""A Host header: an address or a name, and a port."""
OPEN = ("/", "/health", "/favicon.ico")
OPEN_UNDER = "/static/"
"""Paths that need no key: those of the page itself, which asks for the key."""
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
)


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, key: str | None, allowed_hosts: Sequence[str], counts: HttpCounts) -> None:
        self.app, self.counts = app, counts
        self.key = None if key is None else key.encode()
        self.allowed_hosts = {name.lower().rstrip(".") for name in allowed_hosts} | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None  # A websocket, of which there are none: the server refuses it.
        begun, status, is_open_stream = time.perf_counter(), 0, False
        is_head = scope.get("method") == "HEAD"
        if is_head:
            scope = {**scope, "method": "GET"}

        async def guarded_send(message: Message) -> None:
            nonlocal status, is_open_stream
            if message["type"] == "http.response.start":
                status = message["status"]
                is_open_stream = any(value.startswith(b"text/event-stream") for _, value in message.get("headers", ()))
                present = {name.lower() for name, _ in message.get("headers", ())}
                added = [(name, value) for name, value in HEADERS if name not in present]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            elif not message.get("more_body", False):
                is_open_stream = False
            if is_head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        try:
            headers = _headers(scope)
            self._check(scope["path"], headers)
            await self.app(scope, _limited(headers, receive), guarded_send)
        except RequestError as error:
            if not status:
                await error.response()(scope, receive, guarded_send)
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:  # The server stops, and its time for what is under way has passed.
            refusal = stopping("the server stops before the answer is complete; send the request again")
            with suppress(TimeoutError):
                async with asyncio.timeout(REFUSAL_SECONDS):
                    if not status:
                        await refusal.response()(scope, receive, guarded_send)
                    elif is_open_stream:
                        event = f"data: {json.dumps(refusal.body())}\n\n"
                        await guarded_send({"type": "http.response.body", "body": event.encode()})
        except Exception:  # Our own mistakes: clients learn nothing of the machine.
            LOG.exception("a request failed")
            if not status:
                failure = RequestError("the server failed; its log says why", status=500)
                await failure.response()(scope, receive, guarded_send)
        finally:
            self.counts.add(status, time.perf_counter() - begun)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._is_known(host):
            raise RequestError(
                "the Host header is not a name of this server; use its address or localhost, or start it with that name in "
                "--allowed-hosts",
                code="host_not_allowed",
                status=403,
            )
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() not in (
            f"http://{host.lower()}",
            f"https://{host.lower()}",
        ):
            raise RequestError("requests from other sites are refused", code="origin_not_allowed", status=403)
        if headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site") and path not in OPEN:
            raise RequestError("requests from other sites are refused", code="origin_not_allowed", status=403)
        if self.key is not None and path not in OPEN and not path.startswith(OPEN_UNDER):
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self.key):
                raise RequestError(
                    "a key is needed: send the header Authorization: Bearer KEY", code="invalid_api_key", status=401,
                    headers={"WWW-Authenticate": "Bearer"},
                )  # fmt: skip

    def _is_known(self, host: str) -> bool:
        """Whether a Host header has a name of this server. Addresses are: no site can make one resolve to another."""
        match = HOST.fullmatch(host)
        if match is None or int(match["port"] or 0) > 65_535:
            return False
        name = (match["address"] or match["name"]).lower()
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.rstrip(".") in self.allowed_hosts
        return True


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """The headers; of those that come twice, the guard's own must not."""
    headers: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in headers and name in (b"host", b"origin", b"authorization", b"content-length"):
            raise RequestError(f"the header {name.decode('latin-1')} comes twice")
        headers[name] = value
    return headers


def _limited(headers: dict[bytes, bytes], receive: Receive) -> Receive:
    """Receives a body of LARGEST_BODY bytes at most."""
    error = RequestError(f"the body must have at most {LARGEST_BODY:,} bytes", code="request_too_large", status=413)
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or len(length) > 18 or int(length) > LARGEST_BODY:
        raise error
    received = 0

    async def limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > LARGEST_BODY:
            raise error
        return message

    return limited
