"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from typing import ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field
from pydantic.config import JsonDict
from typing_extensions import TypedDict

from server.apis.openai.request import ChatRequest
from server.endpoints import Served
from server.errors import refused
from server.http.openapi import REFUSED_BODY, errors
from server.request.body import Body, TokenId, in_case, optional
from server.request.chat import MAX_MESSAGES, Chat, Completion, TemplateFields
from server.request.large_bodies import BodyRoute
from server.request.messages import MAX_TOOLS, ChatMessage, ToolsField
from server.request.translate import Translator

router = APIRouter(tags=["tokens"], route_class=BodyRoute)


_PROMPT_OR_MESSAGES: JsonDict = {
    "anyOf": [
        in_case(
            {"prompt": {"type": "string"}}, ("messages", "tools", *TemplateFields.model_fields)
        ),
        in_case({"messages": {"type": "array"}}, ("prompt",)),
    ]
}


class TokenizeRequest(TemplateFields):
    """``POST /tokenize``: of a ``prompt`` as ``/v1/completions`` takes it, or of ``messages`` as
    ``/v1/chat/completions`` does.
    """

    model_config = ConfigDict(json_schema_extra=_PROMPT_OR_MESSAGES)

    unsupported: ClassVar[dict[str, str]] = ChatRequest.unsupported

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    tools: ToolsField | None = optional("With messages.", max_length=MAX_TOOLS)
    add_special_tokens: bool | None = optional("Default: true for a prompt, false for messages.")
    allow_special_tokens: bool | None = optional("Default: true for a prompt, false for messages.")
    return_token_strs: bool = optional("The vocabulary's entries, too.", default=False)


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


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
    given = {name: getattr(body, name) for name in body.model_fields_set - {"return_token_strs"}}
    if (body.prompt is None) == (body.messages is None):
        raise refused("prompt", ": give either 'prompt' or 'messages'")
    if body.prompt is None:
        return translator.tokenize(Chat.of(**given)), body.return_token_strs
    for name in (*TemplateFields.model_fields, "tools"):
        if name in given:
            raise refused(name, "has no effect on a prompt")
    given["prompt"] = [body.prompt]
    return translator.tokenize(Completion.of(**given)), body.return_token_strs


@router.post("/detokenize", responses={200: {"model": Detokenized}, **_ERRORS})
async def detokenize(body: DetokenizeRequest, request: Request, served: Served) -> Response:
    """The text of tokens."""
    await served.charge(request)
    text, headers = await served.read_apart(body, request, _detokenize)
    return JSONResponse(Detokenized(prompt=text), headers=headers)


def _detokenize(translator: Translator, body: DetokenizeRequest) -> str:
    return translator.detokenize(body.model, body.tokens)
