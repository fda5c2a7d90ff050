"""``/v1/completions``, ``/v1/chat/completions`` and ``/v1/embeddings``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.apis.openai.chat_reply import ChatChunk, ChatCompletion, ChatWriter
from server.apis.openai.completion_reply import Completion, CompletionChunk, CompletionWriter
from server.apis.openai.embeddings_reply import Embeddings, EmbeddingsWriter
from server.apis.openai.request import (
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    embed,
    plan_chat,
    plan_text,
)
from server.endpoints import Served
from server.http.openapi import REFUSED_BODY, errors, generated
from server.request.large_bodies import BodyRoute

router = APIRouter(tags=["openai"], route_class=BodyRoute)


@router.post("/v1/chat/completions", responses=generated(ChatCompletion, ChatChunk))
async def create_chat_completion(body: ChatRequest, request: Request, served: Served) -> Response:
    """An answer to messages."""
    return await served.answer(ChatWriter, body, request, plan_chat)


@router.post("/v1/completions", responses=generated(Completion, CompletionChunk))
async def create_completion(body: CompletionRequest, request: Request, served: Served) -> Response:
    """Text after a prompt."""
    return await served.answer(CompletionWriter, body, request, plan_text)


_ANSWERS = {200: {"model": Embeddings}, **errors(*REFUSED_BODY, 404, 429, 500, 503, 504)}


@router.post("/v1/embeddings", responses=_ANSWERS)
async def create_embeddings(body: EmbeddingsRequest, request: Request, served: Served) -> Response:
    """Texts as vectors, with `--embeddings`."""
    return await served.answer(EmbeddingsWriter, body, request, embed)
