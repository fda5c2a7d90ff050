"""``/api/chat``, ``/api/generate`` and ``/api/embed``, as Ollama has them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from server.apis.ollama.reply import (
    EmbedWriter,
    GenerateWriter,
    OldEmbeddingsWriter,
    OllamaChatReply,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaError,
    OllamaGenerateReply,
    OllamaWriter,
    timestamp,
)
from server.apis.ollama.request import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    check_load,
    plan_ollama,
    plan_ollama_embeddings,
    told_hints,
)
from server.endpoints import Served
from server.http.openapi import REFUSED_BODY, errors, written_in_lines
from server.models.services import Services
from server.plan import ignored_header
from server.request.large_bodies import AnyTypeRoute, LargeBody

router = APIRouter(tags=["ollama"], route_class=AnyTypeRoute)


@router.post("/api/chat", responses=written_in_lines(OllamaChatReply, OllamaError))
async def ollama_chat(body: OllamaChatRequest, request: Request, served: Served) -> Response:
    """Ollama's: an answer to messages, by default as lines of JSON."""
    if not isinstance(body, LargeBody) and body.is_empty:
        message = {"role": "assistant", "content": ""}
        return await _loaded(body, request, served, message=message)
    return await served.answer(OllamaWriter, body, request, plan_ollama)


@router.post("/api/generate", responses=written_in_lines(OllamaGenerateReply, OllamaError))
async def ollama_generate(
    body: OllamaGenerateRequest, request: Request, served: Served
) -> Response:
    """Ollama's: an answer to a prompt, or with `raw` the text after it."""
    if not isinstance(body, LargeBody) and body.is_empty:
        return await _loaded(body, request, served, response="")
    return await served.answer(GenerateWriter, body, request, plan_ollama)


_VECTORS = errors(*REFUSED_BODY, 404, 429, 500, 503, 504, shape=OllamaError)


@router.post("/api/embed", responses={200: {"model": OllamaEmbeddings}, **_VECTORS})
async def ollama_embed(body: OllamaEmbedRequest, request: Request, served: Served) -> Response:
    """Ollama's: texts as vectors, with `--embeddings`."""
    return await served.answer(EmbedWriter, body, request, plan_ollama_embeddings)


@router.post("/api/embeddings", responses={200: {"model": OllamaEmbedding}, **_VECTORS})
async def ollama_old_embed(
    body: OllamaEmbeddingsRequest, request: Request, served: Served
) -> Response:
    """Ollama's, for older clients: one text as a vector."""
    return await served.answer(OldEmbeddingsWriter, body, request, plan_ollama_embeddings)


async def _loaded(
    body: OllamaChatRequest | OllamaGenerateRequest,
    request: Request,
    served: Services | None,
    **piece: Any,
) -> JSONResponse:
    """The answer to nothing, by which Ollama's clients load a model ahead, or unload it; ``served`` is
    None where one is not loaded that is to be unloaded. Raises ApiError 404."""
    if served is None:
        hints = [*told_hints(body, may_go=True)]
    else:
        hints = await served.read(body, request, check_load)
    reply = {
        "model": body.model or (served.model_name if served else ""),
        "created_at": timestamp(),
        **piece,
        "done": True,
        "done_reason": "unload" if body.only_unloads else "load",
    }
    return JSONResponse(reply, headers=ignored_header(hints))
