"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from typing_extensions import TypedDict

from server.endpoints import Served
from server.http.openapi import REFUSED_BODY, errors
from server.request.large_bodies import BodyRoute
from server.request.protocol import DetokenizeRequest, TokenizeRequest
from server.request.translate import Translator

router = APIRouter(tags=["tokens"], route_class=BodyRoute)


class Tokenized(TypedDict):
    """``token_strs``: the vocabulary's entry of each token, where that was asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


_ERRORS = errors(*REFUSED_BODY, 404, 429, 500, 503)


@router.post("/tokenize", responses={200: {"model": Tokenized}, **_ERRORS})
async def tokenize(body: TokenizeRequest, request: Request, served: Served) -> Response:
    """The tokens of a prompt or of messages."""
    await served.charge(request)
    found, headers = await served.read_apart(body, request, _tokenize)
    texts = [served.texts.entry(each) for each in found[0]] if found[1] else None
    reply = Tokenized(
        count=len(found[0]),
        max_model_len=served.engine.info.max_model_len,
        tokens=found[0],
        token_strs=texts,
    )
    return JSONResponse(reply, headers=headers)


def _tokenize(translator: Translator, body: TokenizeRequest) -> tuple[list[int], bool]:
    return translator.tokenize(body), body.return_token_strs


@router.post("/detokenize", responses={200: {"model": Detokenized}, **_ERRORS})
async def detokenize(body: DetokenizeRequest, request: Request, served: Served) -> Response:
    """The text of tokens."""
    await served.charge(request)
    text, headers = await served.read_apart(body, request, Translator.detokenize)
    return JSONResponse(Detokenized(prompt=text), headers=headers)
