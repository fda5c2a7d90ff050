"""``/detokenize``, as vLLM has it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from typing_extensions import TypedDict

from server.endpoints import Served
from server.http.openapi import REFUSED_BODY, errors
from server.request.large_bodies import BodyRoute
from server.request.protocol import DetokenizeRequest
from server.request.translate import Translator

router = APIRouter(tags=["tokens"], route_class=BodyRoute)


class Detokenized(TypedDict):
    prompt: str


@router.post(
    "/detokenize",
    responses={200: {"model": Detokenized}, **errors(*REFUSED_BODY, 404, 429, 500, 503)},
)
async def detokenize(body: DetokenizeRequest, request: Request, served: Served) -> Response:
    """The text of tokens."""
    await served.charge(request)
    text, headers = await served.read_apart(body, request, Translator.detokenize)
    return JSONResponse(Detokenized(prompt=text), headers=headers)
