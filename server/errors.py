"""Errors as OpenAI's clients expect them, ``{"error": {"message", "type", "param", "code"}}``, unless
the path belongs to an API with a shape of its own.

Text a client sent is never echoed at length, and an unexpected exception's text never leaves the
log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope
from typing_extensions import TypedDict

from engine.request.errors import (
    AdapterError,
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    RequestError,
    ShuttingDownError,
    TryLaterError,
    UnknownAdapterError,
)

logger = logging.getLogger(__name__)

REQUEST_ID_KEY = "slipstream.request_id"
"""In a request's scope: the id that its answer carries."""
MAX_LISTED_ERRORS = 10
MAX_MESSAGE_CHARS = 400
MAX_PARAM_CHARS = 120
_MOST_NAMED = 20
# Where other servers stand behind the same name, a client finds one of them by then.
SHUTDOWN_RETRY_SECONDS = 5

TYPES = {
    **dict.fromkeys((400, 405, 408, 413, 414, 421, 431), "invalid_request_error"),
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ErrorDetails(TypedDict):
    """``param``: the dotted path of the field to blame."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    error: ErrorDetails


class ApiError(Exception):
    """An answer other than success. ``param`` is the dotted path of the field to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = clip(message, MAX_MESSAGE_CHARS * MAX_LISTED_ERRORS)
        self.param = None if param is None else clip(param, MAX_PARAM_CHARS)
        self.code = code
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors also come from processes that read bodies.
        make = partial(ApiError, param=self.param, code=self.code, headers=self.headers)
        return make, (self.status, self.message)

    def renamed(self, own: Callable[[str], str]) -> ApiError:
        """Returns the same with a client's own paths of the fields to blame."""
        param = None if self.param is None else own(self.param)
        return ApiError(
            self.status, self.message, param=param, code=self.code, headers=self.headers
        )

    def body(self) -> ErrorReply:
        """Returns the error in OpenAI's shape."""
        return {
            "error": {
                "message": self.message,
                "type": TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def body_at(self, scope: Scope | None) -> Mapping[str, Any]:
        """Returns the error in the shape of the API that a request's path belongs to; None: the request
        has not come far enough to have a path."""
        if scope is not None:
            for prefix, shape in SHAPES.items():
                if f"{scope['path']}/".startswith(f"{prefix}/"):
                    return shape(self, scope)
        return self.body()

    def response(self, scope: Scope) -> JSONResponse:
        return JSONResponse(self.body_at(scope), self.status, self.headers)


class RefusalError(ApiError):
    """A 400 that blames fields. ``findings``: their paths and the reasons. A reason follows its path in
    the message, after a blank unless it begins with a colon; it stands alone where the path is ""."""

    def __init__(self, *findings: tuple[str, str], code: str | None = "invalid_value") -> None:
        told = (
            f"{path}{' ' if path and not reason.startswith(':') else ''}{reason}"
            for path, reason in findings
        )
        super().__init__(400, "; ".join(told), param=findings[0][0] or None, code=code)
        self.findings = findings

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RefusalError, code=self.code), self.findings

    def renamed(self, own: Callable[[str], str]) -> RefusalError:
        findings = ((path and own(path), reason) for path, reason in self.findings)
        return RefusalError(*findings, code=self.code)


@dataclass(frozen=True, slots=True)
class OwnNames:
    """The names that a client's API has for the fields of the request that it is translated to.

    ``paths``: the client's, by those of that request. All that lies within a field keeps its place there,
    unless ``field.*`` has the client's path of it.
    """

    paths: Mapping[str, str] = field(default_factory=dict)

    def of(self, path: str) -> str:
        """Returns the client's path of a field."""
        known, within = path, ""
        while known:
            if within and f"{known}.*" in self.paths:
                return self.paths[f"{known}.*"]
            if known in self.paths:
                return self.paths[known] + within
            known = known.rpartition(".")[0]
            within = path.removeprefix(known)
        return path

    @contextmanager
    def in_refusals(self) -> Iterator[None]:
        """Meanwhile refusals blame the client's own fields."""
        try:
            yield
        except ApiError as error:
            raise error.renamed(self.of) from error


SAME = OwnNames()


SHAPES: dict[str, Callable[[ApiError, Scope], Mapping[str, Any]]] = {}
"""The shapes of errors by the first segments of paths: of APIs that have one of their own, which they put
here."""


def clip(text: str, num_chars: int) -> str:
    """``text``, cut to so many characters with an ellipsis."""
    return text if len(text) <= num_chars else text[: num_chars - 1] + "…"


CLIENT_GONE_STATUS = 499
"""The status in figures of an answer that nobody waits for."""


def bad_request(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def refused(param: str, reason: str, code: str = "invalid_value") -> RefusalError:
    """Returns the refusal of one field."""
    return RefusalError((param, reason), code=code)


def not_found() -> ApiError:
    return ApiError(404, "There is nothing at this path.", code="not_found")


def unauthorized(which: str = "API") -> ApiError:
    return ApiError(
        401,
        f"Give this server's {which} key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def body_too_large() -> ApiError:
    return ApiError(413, "The body is larger than this server accepts.", code="body_too_large")


def url_too_long(num_bytes: int) -> ApiError:
    message = f"The URL is too long: with the headers it may have {num_bytes:,} bytes."
    return ApiError(414, message, code="url_too_long")


def headers_too_large(num_bytes: int, num_headers: int | None = None) -> ApiError:
    most = f"{num_bytes:,} bytes with the URL" if num_headers is None else str(num_headers)
    message = f"There are more headers than this server accepts, trailers among them: {most}."
    return ApiError(431, message, code="headers_too_large")


def request_timeout() -> ApiError:
    message = "The request did not come whole in the time that this server waits for one."
    return ApiError(408, message, code="request_timeout")


def unknown_host(host: str) -> ApiError:
    message = (
        f"This server does not answer to the host '{clip(host, 100)}'. Its operator can add the name to "
        "--allowed-hosts, or set an API key."
    )
    return ApiError(421, message, code="host_not_allowed")


def shutting_down() -> ApiError:
    headers = {"Retry-After": str(SHUTDOWN_RETRY_SECONDS)}
    return ApiError(503, "The server is shutting down.", code="shutting_down", headers=headers)


def unknown_model(name: str, served: str, adapters: Sequence[str] = ()) -> ApiError:
    names = ", ".join(f"'{each}'" for each in (served, *adapters[:_MOST_NAMED]))
    message = f"The model '{clip(name, 100)}' does not exist. This server serves {names}."
    return ApiError(404, message, param="model", code="model_not_found")


def to_api_error(error: Exception) -> ApiError:
    """Any exception as an answer; the text of unexpected ones goes to the log only."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UnknownAdapterError):
        return ApiError(404, f"{error}.", param="model", code="model_not_found")
    if isinstance(error, AdapterError):
        return bad_request("path", f"path: {error}", code="adapter_refused")
    if isinstance(error, RequestError):
        return bad_request(error.param, str(error))
    if isinstance(error, TryLaterError):
        seconds = max(1, math.ceil(error.retry_after_seconds))
        return ApiError(429, str(error), code=error.code, headers={"Retry-After": str(seconds)})
    if isinstance(error, DeadlineExceededError):
        return ApiError(504, str(error), code="deadline_exceeded")
    if isinstance(error, ShuttingDownError):
        return shutting_down()
    if isinstance(error, EngineDeadError):
        # Once for each request that is turned away: the death itself stands in the log already.
        logger.debug("engine is dead: %s", error)
        return ApiError(503, "The engine has stopped; no request is served.", code="engine_dead")
    if isinstance(error, EngineError):
        logger.error("request failed in the engine", exc_info=error)
        return ApiError(500, "The request failed in the engine.", code="request_failed")
    logger.error("unexpected error", exc_info=error)
    return ApiError(500, "Internal server error.", code="internal_error")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> RefusalError:
    """Pydantic's findings as one 400: ``param`` is the first offending field, all are listed."""
    findings = [_finding(error) for error in errors[:MAX_LISTED_ERRORS]]
    if len(errors) > MAX_LISTED_ERRORS:
        findings.append(("", f"and {len(errors) - MAX_LISTED_ERRORS} more"))
    return RefusalError(*findings)


def _finding(error: Mapping[str, Any]) -> tuple[str, str]:
    location = [str(part) for part in error["loc"] if part != "body"]
    if error["type"] == "json_invalid":
        return "", f"The body is not valid JSON (character {location[-1]})."
    if not location:
        return "", "The body must be a JSON object sent with 'Content-Type: application/json'."
    param = clip(".".join(location), MAX_PARAM_CHARS)
    if error["type"] == "extra_forbidden":
        return param, ": this server knows no such field"
    text = str(error["msg"]).removeprefix("Value error, ")
    return param, f": {clip(text[:1].lower() + text[1:], MAX_MESSAGE_CHARS)}"


def install_error_handlers(app: FastAPI, count_rejection: Callable[[str], None]) -> None:
    """Every error leaves the app in the shape of its path, and is counted by its code."""

    def answer(request: Request, error: ApiError) -> JSONResponse:
        count_rejection(error.code or str(error.status))
        return error.response(request.scope)

    async def on_api_error(request: Request, error: Exception) -> JSONResponse:
        return answer(request, to_api_error(error))

    async def on_invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return answer(request, from_validation(error.errors()))

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == 413:
            return answer(request, body_too_large())
        if error.status_code == 404:
            return not_found().response(request.scope)
        code, message = None, str(error.detail)
        if error.status_code == 405:
            code, message = "method_not_allowed", "This path does not take this method."
        found = ApiError(error.status_code, message, code=code, headers=error.headers)
        return found.response(request.scope)

    # Others are answered by AnswerMiddleware.
    for kind in (ApiError, EngineError):
        app.add_exception_handler(kind, on_api_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
