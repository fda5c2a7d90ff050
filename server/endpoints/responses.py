"""``/v1/responses``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.endpoints import Served
from server.http.openapi import generated
from server.reply.responses import ModelResponse, ResponseEvent, ResponsesWriter
from server.reply.streaming import answer
from server.request.large_bodies import BodyRoute
from server.request.responses import ResponsesRequest, plan_response

router = APIRouter(tags=["openai"], route_class=BodyRoute)

_ANSWERS = generated(ModelResponse, ResponseEvent, ends_with_done=False)


@router.post("/v1/responses", responses=_ANSWERS)
async def create_response(body: ResponsesRequest, request: Request, served: Served) -> Response:
    """A response to a conversation that is sent whole; nothing is stored."""
    writer = await served.writer(ResponsesWriter, body, request, plan_response)
    return await answer(request, served.choices.run, writer)
