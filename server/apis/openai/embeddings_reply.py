"""Replies of ``/v1/embeddings``."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from server.reply.deltas import ChoiceDelta
from server.reply.usage import Usage
from server.reply.writers import WholeWriter, embeddings, numbers


class EmbeddingsUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    """``embedding``: of length 1; as base64, of its numbers in 32 bits, little end first."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class EmbeddingsWriter(WholeWriter):
    """``/v1/embeddings``."""

    def reply(self, choices: Sequence[ChoiceDelta], usage: Usage) -> Mapping[str, Any]:
        vectors = (
            b64encode(each).decode() if self.plan.as_base64 else numbers(each)
            for each in embeddings(choices)
        )
        return Embeddings(
            object="list",
            data=[
                Embedding(object="embedding", index=index, embedding=each)
                for index, each in enumerate(vectors)
            ],
            model=self.plan.model,
            usage=EmbeddingsUsage(
                prompt_tokens=usage["prompt_tokens"], total_tokens=usage["prompt_tokens"]
            ),
        )
