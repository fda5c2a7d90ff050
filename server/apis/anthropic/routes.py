"""``/v1/messages`` and ``/v1/messages/count_tokens``, as Anthropic has them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from typing_extensions import TypedDict

from server.apis.anthropic.reply import (
    AnthropicErrorReply,
    AnthropicEvent,
    AnthropicMessage,
    MessagesWriter,
)
from server.apis.anthropic.request import (
    CountTokensRequest,
    MessagesRequest,
    count_tokens,
    plan_messages,
)
from server.endpoints import Served
from server.http.openapi import REFUSED_BODY, errors, generated
from server.request.large_bodies import BodyRoute

router = APIRouter(tags=["anthropic"], route_class=BodyRoute)


class TokenCount(TypedDict):
    input_tokens: int


_ANSWERS = generated(
    AnthropicMessage, AnthropicEvent, ends_with_done=False, shape=AnthropicErrorReply
)
_COUNTED = {
    200: {"model": TokenCount},
    **errors(*REFUSED_BODY, 404, 429, 500, 503, shape=AnthropicErrorReply),
}


@router.post("/v1/messages", responses=_ANSWERS)
async def create_message(body: MessagesRequest, request: Request, served: Served) -> Response:
    """Anthropic's: an answer to messages."""
    return await served.answer(MessagesWriter, body, request, plan_messages)


@router.post("/v1/messages/count_tokens", responses=_COUNTED)
async def count_message_tokens(
    body: CountTokensRequest, request: Request, served: Served
) -> Response:
    """Anthropic's: the tokens of the prompt that messages make."""
    await served.charge(request)
    count, headers = await served.read_apart(body, request, count_tokens)
    return JSONResponse(TokenCount(input_tokens=count), headers=headers)
