"""Prompts of the model served: from texts, token ids and messages to token ids, and their lengths.

Lengths follow vLLM: a prompt that leaves no room for a single token is a 400.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.request.info import EngineInfo
from server.errors import ApiError, refused
from server.plan import Prompt
from server.request.chat_template import ChatTemplate
from server.request.messages import template_messages
from server.request.protocol import ChatMessage, TemplateFields
from server.request.special_tokens import Piece, TextEncoder
from server.request.tools import Tool


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """``add_special_tokens``: those that the tokenizer puts around every text;
    ``allow_special_tokens``: those that users' texts spell. ``num_kept``: how many tokens are left of a
    longer prompt, its last ones, or with ``keeps_first`` its first."""

    add_special_tokens: bool
    allow_special_tokens: bool
    num_kept: int | None = None
    keeps_first: bool = False

    def cut(self, token_ids: Sequence[int]) -> Sequence[int]:
        if self.num_kept is None or len(token_ids) <= self.num_kept:
            return token_ids
        return token_ids[: self.num_kept] if self.keeps_first else token_ids[-self.num_kept :]


class Prompts:
    """Knows the tokenizer, its template, and the lengths there are."""

    def __init__(self, info: EngineInfo, tokenizer: Any) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._texts = TextEncoder(tokenizer)
        self._template = ChatTemplate(tokenizer, self._texts.spellings)
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    def of_text(self, field: str, text: str, options: PromptOptions) -> Prompt:
        """Raises ApiError naming the field."""
        return self._prompt(field, [(options.allow_special_tokens, text)], options)

    def of_token_ids(self, field: str, token_ids: Sequence[int], options: PromptOptions) -> Prompt:
        """Raises ApiError naming the field."""
        token_ids = options.cut(token_ids)
        self._check_length(field, len(token_ids))
        self.check_token_ids(field, token_ids)
        return Prompt(self.decode(token_ids), tuple(token_ids))

    def of_messages(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        fields: TemplateFields,
        options: PromptOptions,
    ) -> Prompt:
        """Raises ApiError naming the field at fault."""
        return self._prompt("messages", self.render(messages, tools, fields, options), options)

    def encode(self, field: str, pieces: list[Piece], options: PromptOptions) -> list[int]:
        """Returns the tokens of a text, however many. Raises ApiError naming the field."""
        if options.allow_special_tokens:
            text = "".join(piece for _, piece in pieces)
            return self._texts.encode(text, options.add_special_tokens)
        return self._texts.encode_pieces(field, pieces, options.add_special_tokens)

    def encode_prediction(
        self, field: str, text: str, allow_special_tokens: bool
    ) -> tuple[int, ...]:
        """Raises ApiError naming the field."""
        limit = self._info.max_model_len
        too_long = refused(field, f"exceeds the context of {limit}")
        if self._at_least(text) >= limit:
            raise too_long
        options = PromptOptions(False, allow_special_tokens)
        token_ids = self.encode(field, [(allow_special_tokens, text)], options)
        if not token_ids:
            raise refused(field, ": the prediction has no tokens")
        if len(token_ids) > limit:
            raise too_long
        return tuple(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return text

    def check_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        """Raises ApiError naming the field."""
        for token_id in token_ids:
            if not 0 <= token_id < self._info.vocab_size:
                last = self._info.vocab_size - 1
                raise refused(field, f": token id {token_id} is not in 0..{last}")

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        fields: TemplateFields,
        options: PromptOptions,
    ) -> list[Piece]:
        """Returns the chat template's text for the messages. Raises ApiError naming the field."""
        if fields.continue_final_message and fields.add_generation_prompt:
            raise refused(
                "continue_final_message",
                "needs 'add_generation_prompt': false",
            )
        return self._template.render(
            template_messages(messages),
            fields.chat_template_kwargs or {},
            tools=[
                {"type": "function", "function": each.function.for_template()} for each in tools
            ],
            allow_special_tokens=options.allow_special_tokens,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
        )

    def _prompt(self, field: str, pieces: list[Piece], options: PromptOptions) -> Prompt:
        text = "".join(piece for _, piece in pieces)
        at_least = self._at_least(text)
        if options.num_kept is None and at_least >= self._info.max_model_len:
            # Not worth tokenizing.
            raise self._too_long(field, f"at least {at_least}")
        token_ids = self.encode(field, pieces, options)
        if not token_ids and self._tokenizer.bos_token_id is not None:
            token_ids = [self._tokenizer.bos_token_id]
        kept = options.cut(token_ids)
        self._check_length(field, len(kept))
        return Prompt(text if len(kept) == len(token_ids) else self.decode(kept), tuple(kept))

    def _at_least(self, text: str) -> int:
        """Tokens: none can hold more than the longest one's characters."""
        return len(text) // self._longest_token

    def _check_length(self, field: str, num_tokens: int) -> None:
        if not num_tokens:
            raise refused(field, ": the prompt has no tokens")
        if num_tokens >= self._info.max_model_len:
            raise self._too_long(field, str(num_tokens))

    def _too_long(self, field: str, num_tokens: str) -> ApiError:
        return refused(
            field,
            f": the prompt has {num_tokens} tokens; the context is "
            f"{self._info.max_model_len}, and at least one has to be left to write",
            code="context_length_exceeded",
        )
