"""Errors that a client sees, in the shape that OpenAI clients know."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from longstride.common.checks import printable

BY_STATUS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""The type of an error, where it is not that the request is invalid."""


class RequestError(Exception):
    """A request that cannot be answered, and what to change. The message is for clients: it names nothing of the machine."""

    def __init__(
        self, message: str, param: str | None = None, *, code: str | None = None, status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.message, self.param, self.code, self.status, self.headers = message, param, code, status, headers

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else BY_STATUS.get(self.status, "invalid_request_error")
        param = None if self.param is None else printable(self.param)
        return {"error": {"message": printable(self.message), "type": kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=dict(self.headers or {}))


def stopping(message: str) -> RequestError:
    return RequestError(message, code="stopping", status=503, headers={"Retry-After": "5"})
