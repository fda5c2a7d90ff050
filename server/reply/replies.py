"""The replies of both endpoints, in OpenAI's shape plus our own fields.

Own fields: ``usage.speculative``, ``seed`` (the one used: sending it again reproduces the reply),
and per choice ``stop_reason``, ``token_ids``, ``prompt_token_ids`` and ``tokens``. With ``tokens`` come
``num_steps``, the steps that a chunk tells of, and ``num_draft_tokens``, the drafts they verified. A
field that was not asked for is left out.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length"]


class GammaMove(BaseModel):
    """At step ``step`` of choice ``choice`` gamma became ``gamma``."""

    choice: int
    step: int
    gamma: int
    reason: str


class SpeculativeUsage(BaseModel):
    """What was drafted and gained, over all choices; ``server.reply.usage.merge`` says how they are
    combined.
    """

    drafter: str
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float | None
    tokens_per_step: float | None
    mean_gamma: float
    acceptance_histogram: list[int]
    accepted_per_position: list[int]
    estimated_speedup: float | None
    draft_ms: float
    verify_ms: float
    gamma_changes: list[GammaMove]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Of requests with a ``prediction``: its drafts that became output, and those that did not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    """A prompt counts once however many choices it has; tokens a stop string cut off do not
    count. ``completion_tokens_details`` is there for requests with a ``prediction``.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    speculative: SpeculativeUsage


class DraftedToken(BaseModel):
    """``text``: what the token added to the choice's text; ``drafted``: an accepted draft."""

    id: int
    text: str
    drafted: bool


class CompletionLogprobs(BaseModel):
    """``text_offset`` counts characters from the start of the choice's whole text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    tokens: list[DraftedToken] | None = None
    num_steps: int | None = None
    num_draft_tokens: int | None = None


class Completion(BaseModel):
    """A whole reply, or one chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    seed: int
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """``bytes``: the token's UTF-8 bytes, possibly a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]


class ChatReplyMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatReplyMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    tokens: list[DraftedToken] | None = None
    num_steps: int | None = None
    num_draft_tokens: int | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    tokens: list[DraftedToken] | None = None
    num_steps: int | None = None
    num_draft_tokens: int | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    seed: int
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    seed: int
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
