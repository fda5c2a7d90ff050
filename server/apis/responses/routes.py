"""``/v1/responses``."""

from __future__ import annotations

import json
from functools import partial
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from typing_extensions import TypedDict

from server.apis.responses.reply import ModelResponse, ResponseEvent, ResponsesWriter
from server.apis.responses.request import (
    Known,
    ResponsesRequest,
    plan_response,
    references,
)
from server.endpoints import Served, Table
from server.errors import ApiError, bad_request, clip
from server.http.openapi import REFUSED_BODY, errors, generated
from server.models.services import Services, tenant_of
from server.models.table import Models
from server.plan import ignored_header
from server.request.large_bodies import LARGE, BodyRoute, LargeBody

router = APIRouter(tags=["openai"], route_class=BodyRoute)
_NAMING = (b'"previous_response_id"', b'"item_reference"')


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


_PATH = "/v1/responses"
_ANSWERS = generated(ModelResponse, ResponseEvent, ends_with_done=False)
_COUNTED = {200: {"model": InputTokens}, **errors(*REFUSED_BODY, 404, 429, 500, 503)}
_OF_ONE = errors(401, 404, 500, 503)


@router.post(_PATH, responses=_ANSWERS)
async def create_response(body: ResponsesRequest, request: Request, served: Served) -> Response:
    """A response, also going on from one that is kept."""
    given, known = await _with_known(body, request, served)
    kind = partial(ResponsesWriter, keep=partial(served.ask_store, "keep", tenant_of(request)))
    return await served.answer(kind, given, request, partial(plan_response, known=known))


@router.post(f"{_PATH}/input_tokens", responses=_COUNTED)
async def count_input_tokens(body: ResponsesRequest, request: Request, served: Served) -> Response:
    """The tokens of the prompt that an input makes."""
    await served.charge(request)
    given, known = await _with_known(body, request, served)
    plan = await served.read(given, request, partial(plan_response, arrival_time=0.0, known=known))
    reply = InputTokens(object="response.input_tokens", input_tokens=plan.num_prompt_tokens)
    return JSONResponse(reply, headers=ignored_header(plan.ignored))


@router.get(_PATH + "/{response_id}", responses={**errors(400), **_OF_ONE})
async def get_response(
    response_id: str, request: Request, models: Table, stream: bool = False
) -> Response:
    """A response that is kept, as a whole."""
    if stream:
        raise bad_request("stream", "stream: a response that is kept comes as a whole")
    return JSONResponse(json.loads(await _have("find", response_id, request, models))["response"])


@router.delete(_PATH + "/{response_id}", responses=_OF_ONE)
async def delete_response(response_id: str, request: Request, models: Table) -> Response:
    """It is kept no longer."""
    await _have("drop", response_id, request, models)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def _have(act: str, response_id: str, request: Request, models: Models) -> bytes:
    """Returns the record that the store finds, or found and dropped. Raises ApiError 404."""
    record = await models.ask_store(act, tenant_of(request), response_id)
    if record is None:
        raise ApiError(404, f"Response with id '{clip(response_id, 64)}' not found.")
    return record


async def _with_known(
    body: ResponsesRequest | LargeBody, request: Request, served: Services
) -> tuple[ResponsesRequest | LargeBody, Known]:
    """The body, as a large one where what it goes on from is large, and the responses that it names."""
    if isinstance(body, LargeBody) and not any(each in body.content for each in _NAMING):
        return body, {}
    tenant, known = tenant_of(request), {}
    for each in await served.bodies.read(body, references):
        if (record := await served.ask_store("find", tenant, each)) is not None:
            known[each] = record
    if not isinstance(body, LargeBody) and sum(map(len, known.values())) > LARGE:
        return LargeBody(ResponsesRequest, body), known
    return body, known
