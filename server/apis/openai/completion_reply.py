"""Replies of ``/v1/completions``: text, whole or in chunks of the same shape."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from engine.request.events import TokenLogprobs
from server.apis.openai.reply import (
    NOTHING_OF_PROMPT,
    Chunk,
    ChunkWriter,
    Ending,
    OfPrompt,
    Whole,
)
from server.reply.deltas import ChoiceDelta


class CompletionLogprobs(TypedDict):
    """``text_offset`` counts characters from the start of the choice's whole text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Ending, OfPrompt):
    index: int
    text: str
    logprobs: CompletionLogprobs | None


class CompletionChunk(Chunk):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Completion(Whole):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionWriter(ChunkWriter):
    """``/v1/completions``: a chunk has the shape of the whole."""

    id_prefix = "cmpl"
    whole = chunk = "text_completion"

    def _chunk_choice(self, delta: ChoiceDelta) -> CompletionChoice:
        return {
            "index": delta.index,
            "text": self._text(delta),
            "logprobs": None if self.plan.num_logprobs is None else self._logprobs(delta),
            **self._ending(delta),
            **self._of_prompt(delta),
        }

    def _whole_choice(self, delta: ChoiceDelta) -> CompletionChoice:
        return {**NOTHING_OF_PROMPT, "token_ids": None, **self._chunk_choice(delta)}

    def _logprobs(self, delta: ChoiceDelta) -> CompletionLogprobs:
        block = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if self.plan.echo and delta.prompt_logprobs is not None:
            self._add_prompt(block, delta)
        start = len(self.plan.beginning(delta.index))
        for token in delta.tokens:
            self._add(block, token.token_id, token.logprobs, start + token.start)
        return block

    def _add_prompt(self, block: CompletionLogprobs, delta: ChoiceDelta) -> None:
        """The prompt's tokens; the first has no logprob, since nothing comes before it."""
        assert delta.prompt_logprobs is not None
        text, token_ids = self.plan.beginning(delta.index), self.plan.prompt_token_ids(delta.index)
        pieces = self._texts.pieces(token_ids)
        offset = 0
        for token_id, piece, logprobs in zip(token_ids, pieces, delta.prompt_logprobs, strict=True):
            self._add(block, token_id, logprobs, offset)
            if token_id in self._texts.special_ids:
                # The tokenizer may have added it, and then it is not in the text.
                name = self._texts.text(token_id)
                offset += len(name) if text.startswith(name, offset) else 0
            offset += len(piece)

    def _add(
        self,
        block: CompletionLogprobs,
        token_id: int,
        logprobs: TokenLogprobs | None,
        offset: int,
    ) -> None:
        block["tokens"].append(self._name(token_id))
        block["text_offset"].append(offset)
        block["token_logprobs"].append(None if logprobs is None else logprobs.logprob)
        if logprobs is None:
            block["top_logprobs"].append(None)
            return
        # OpenAI lists the chosen token too, so there may be one entry more than was asked for; as in vLLM
        # it comes first.
        shown = [(token_id, logprobs.logprob), *self._shown(logprobs)]
        block["top_logprobs"].append({self._name(each): logprob for each, logprob in shown})
