"""``/v1/chat/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.endpoints import Served
from server.http.openapi import generated
from server.reply.chats import ChatChunk, ChatCompletion, ChatWriter
from server.reply.streaming import answer
from server.request.large_bodies import BodyRoute
from server.request.protocol import ChatRequest
from server.request.translate import Translator

router = APIRouter(tags=["openai"], route_class=BodyRoute)


@router.post("/v1/chat/completions", responses=generated(ChatCompletion, ChatChunk))
async def create_chat_completion(body: ChatRequest, request: Request, served: Served) -> Response:
    """An answer to messages."""
    writer = await served.writer(ChatWriter, body, request, Translator.plan)
    return await answer(request, served.choices.run, writer)
