"""``POST /v1/embeddings``: its fields, and a plan whose choices are texts after which nothing is
written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from engine.request.params import PLAIN
from server.errors import OwnNames, bad_request, refused
from server.plan import RequestPlan
from server.request.body import Body, PromptField, WithoutEffect, optional
from server.request.parsing import check
from server.request.protocol import MAX_COUNT, WITHOUT_EFFECT, CompletionRequest, sharing
from server.request.translate import Translator

MAX_TEXTS = 2048
"""OpenAI's limit of texts in a request."""


@sharing("user", "priority", "timeout", "cache_salt")
class EmbeddingsRequest(Body):
    """``POST /v1/embeddings``."""

    without_effect: ClassVar[WithoutEffect] = WITHOUT_EFFECT

    model: str | None = optional("The served model's name; may be left out.")
    input: PromptField = Field(description="Text or token ids, one or a batch.")
    encoding_format: Literal["float", "base64"] = optional(
        "base64: of the numbers in 32 bits, little end first.", default="float"
    )
    dimensions: int | None = optional("Only the model's own number.", ge=1)
    truncate_prompt_tokens: int | None = optional(
        "Keep so many of a text's tokens, the first; -1: what there is room for.",
        ge=-1,
        le=MAX_COUNT,
    )


def plan_embeddings(
    translator: Translator, body: EmbeddingsRequest, arrival_time: float, field: str = "input"
) -> RequestPlan:
    """Returns a plan with a choice for each text. ``field``: the client's that has them. Raises
    ApiError."""
    if translator.info.embeddings == "none":
        raise bad_request(
            None,
            "This server makes no embeddings; its operator can have it do so with --embeddings mean or "
            "--embeddings last.",
            code="no_embeddings",
        )
    if body.dimensions not in (None, translator.info.hidden_size):
        raise refused("dimensions", f": this model's embeddings have {translator.info.hidden_size}")
    given: dict[str, Any] = body.model_dump(exclude={"input", "encoding_format", "dimensions"})
    # Texts are text, whatever they spell; nothing is written, so there is nothing to draft.
    given |= {"prompt": body.input, "max_tokens": 1, "seed": 0, "allow_special_tokens": False}
    if body.truncate_prompt_tokens is not None:
        given["truncation_side"] = "right"
    names = OwnNames({"prompt": field})
    plan = translator.plan(check(CompletionRequest, given, names), arrival_time, names, MAX_TEXTS)
    choices = tuple(
        replace(
            each,
            request=replace(each.request, pooling=translator.info.embeddings, speculative=PLAIN),
        )
        for each in plan.choices
    )
    as_base64 = body.encoding_format == "base64"
    return replace(plan, choices=choices, ignored=(), as_base64=as_base64).ignoring(body.ignored())
