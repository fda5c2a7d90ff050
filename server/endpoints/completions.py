"""``/v1/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.endpoints import Served
from server.http.openapi import generated
from server.reply.completions import Completion, CompletionChunk, CompletionWriter
from server.reply.streaming import answer
from server.request.large_bodies import BodyRoute
from server.request.protocol import CompletionRequest
from server.request.translate import Translator

router = APIRouter(tags=["openai"], route_class=BodyRoute)


@router.post("/v1/completions", responses=generated(Completion, CompletionChunk))
async def create_completion(body: CompletionRequest, request: Request, served: Served) -> Response:
    """Text after a prompt."""
    writer = await served.writer(CompletionWriter, body, request, Translator.plan)
    return await answer(request, served.choices.run, writer)
