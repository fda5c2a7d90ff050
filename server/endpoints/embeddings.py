"""``/v1/embeddings``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.endpoints import Served
from server.http.openapi import REFUSED_BODY, errors
from server.reply.embeddings import Embeddings, EmbeddingsWriter
from server.reply.streaming import answer
from server.request.embeddings import EmbeddingsRequest, plan_embeddings
from server.request.large_bodies import BodyRoute

router = APIRouter(tags=["openai"], route_class=BodyRoute)

_ANSWERS = {200: {"model": Embeddings}, **errors(*REFUSED_BODY, 404, 429, 500, 503, 504)}


@router.post("/v1/embeddings", responses=_ANSWERS)
async def create_embeddings(body: EmbeddingsRequest, request: Request, served: Served) -> Response:
    """Texts as vectors, where the server was told to make them."""
    writer = await served.writer(EmbeddingsWriter, body, request, plan_embeddings)
    return await answer(request, served.choices.run, writer)
