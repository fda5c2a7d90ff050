"""``POST /v1/embeddings``: its fields, and a plan whose choices are texts after which nothing is
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from engine.request.params import PLAIN
from server.errors import ApiError, bad_request, refused
from server.plan import RequestPlan
from server.request.body import Body, PromptField, optional
from server.request.parsing import check
from server.request.protocol import MAX_COUNT, CompletionRequest
from server.request.translate import Translator


class EmbeddingsRequest(Body):
    """``POST /v1/embeddings``."""

    model: str | None = optional("The served model's name; may be left out.")
    input: PromptField = Field(description="Text or token ids, one or a batch.")
    encoding_format: Literal["float", "base64"] = optional(
        "base64: of the numbers in 32 bits, little end first.", default="float"
    )
    dimensions: int | None = optional("Only the model's own number.", ge=1)
    user: str | None = optional("Written to the request log.", max_length=256)
    priority: int = optional("Lower runs first.", default=0, ge=-MAX_COUNT, le=MAX_COUNT)
    timeout: float | None = optional(
        "Seconds from arrival in which the reply has to be done; later it is an error.",
        gt=0,
        allow_inf_nan=False,
    )
    cache_salt: str | None = optional(
        "Caches are shared within one cache_salt only.", min_length=1, max_length=256
    )


def plan_embeddings(
    translator: Translator,
    body: EmbeddingsRequest,
    arrival_time: float,
    drafters: Sequence[str] | None = None,
) -> RequestPlan:
    """Returns a plan with a choice for each text. Raises ApiError."""
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
    try:
        plan = translator.plan(check(CompletionRequest, given), arrival_time, drafters)
    except ApiError as error:
        raise error.about("input") if error.param == "prompt" else error from error
    choices = tuple(
        replace(
            each,
            request=replace(each.request, pooling=translator.info.embeddings, speculative=PLAIN),
        )
        for each in plan.choices
    )
    repeated = {"encoding_format": body.encoding_format}
    return replace(plan, choices=choices, repeated=repeated)
