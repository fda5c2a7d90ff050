"""Prompts of the model served: from texts, token ids and messages to token ids, and their lengths.

Lengths follow vLLM: a prompt that leaves no room for a single token is a 400.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jinja2.ext
from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta, nodes

from engine.request.info import EngineInfo
from server.errors import ApiError, bad_request, refused
from server.request.infill import Infill
from server.request.render_limit import LIMIT, is_heavy
from server.request.special_tokens import Disguise, Spellings, Text, TextEncoder, joined

logger = logging.getLogger(__name__)

# What the server and transformers give a template themselves.
_NOT_THE_CLIENTS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "raise_exception",
        "strftime_now",
    }
)
_PROBE = "probe"
_USER = {"role": "user", "content": ""}
# transformers' own tags; what stands between them is as it was.
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
ALL = slice(None)
# More than the largest context's text.
_MOST_CHARS = 64 << 20


class Prompts:
    """Knows the tokenizer, its template, and the lengths there are."""

    def __init__(self, info: EngineInfo, tokenizer: Any) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._texts = TextEncoder(tokenizer)
        self.template = ChatTemplate(tokenizer, self._texts.spellings)
        self.infill = Infill(tokenizer)
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    def of_text(
        self, field: str, text: Text, add_special_tokens: bool, kept: slice = ALL
    ) -> tuple[str, tuple[int, ...]]:
        """Returns the text and the tokens of a prompt, of which only those at ``kept`` are left.
        ``add_special_tokens``: those that the tokenizer puts around every text. Raises ApiError naming
        the field."""
        whole = joined(text)
        at_least = self._at_least(whole)
        if kept == ALL and at_least >= self._info.max_model_len:
            # Not worth tokenizing.
            raise self._too_long(field, f"at least {at_least}")
        token_ids = self.encode(field, text, add_special_tokens)
        if not token_ids and self._tokenizer.bos_token_id is not None:
            token_ids = [self._tokenizer.bos_token_id]
        left = token_ids[kept]
        self._check_length(field, len(left))
        return whole if len(left) == len(token_ids) else self.decode(left), tuple(left)

    def of_token_ids(
        self, field: str, token_ids: Sequence[int], kept: slice = ALL
    ) -> tuple[str, tuple[int, ...]]:
        """Returns the text and the tokens of a prompt. Raises ApiError naming the field."""
        token_ids = token_ids[kept]
        self._check_length(field, len(token_ids))
        self.check_token_ids(field, token_ids)
        return self.decode(token_ids), tuple(token_ids)

    def encode(self, field: str, text: Text, add_special_tokens: bool) -> list[int]:
        """Returns the tokens of a text, however many. Raises ApiError naming the field."""
        return self._texts.encode(field, text, add_special_tokens)

    def of_prediction(self, field: str, text: Text) -> tuple[int, ...]:
        """Raises ApiError naming the field."""
        limit = self._info.max_model_len
        too_long = refused(field, f"exceeds the context of {limit}")
        if self._at_least(joined(text)) >= limit:
            raise too_long
        token_ids = self.encode(field, text, False)
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

    def _at_least(self, text: str) -> int:
        """Tokens: none can hold more than the longest one's characters."""
        return len(text) // self._longest_token

    def _check_length(self, field: str, num_tokens: int) -> None:
        if not num_tokens:
            raise refused(field, ": the prompt has no tokens")
        if num_tokens >= self._info.max_model_len:
            raise self._too_long(field, str(num_tokens))

    def _too_long(self, field: str, num_tokens: str) -> ApiError:
        # Agents see by these words, Anthropic's and OpenAI's, that they have to shorten a conversation.
        limit = self._info.max_model_len
        return refused(
            field,
            f": prompt is too long: {num_tokens} tokens > {limit - 1} maximum. This model's maximum "
            f"context length is {limit} tokens, and at least one has to be left to write.",
            code="context_length_exceeded",
        )


def template_of(tokenizer: Any) -> str:
    """Returns the text of a tokenizer's chat template, "" where it has none: of all, where there are
    several, among which transformers chooses by whether there are tools."""
    found = tokenizer.chat_template or ""
    return "\n".join(found.values()) if isinstance(found, dict) else str(found)


class ChatTemplate:
    """The tokenizer's: which ``variables`` it reads that are the client's, what it makes of messages, and
    who is to blame where it makes nothing of them."""

    def __init__(self, tokenizer: Any, spellings: Spellings) -> None:
        self._tokenizer = tokenizer
        self._spellings = spellings
        self.source = template_of(tokenizer) or None
        self.variables, self._is_heavy = _known_of(self.source or "")
        self.takes_tools = "tools" in self.variables
        self._reserved = _NOT_THE_CLIENTS | tokenizer.special_tokens_map.keys()
        self.variables -= self._reserved

    def read_of(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those of the client's variables that the template reads. Raises ApiError for what is
        not the client's to say."""
        for name in given:
            if name in self._reserved:
                field = f"chat_template_kwargs.{name}"
                raise refused(field, ": the server itself tells the chat template")
        return {name: value for name, value in given.items() if name in self.variables}

    def render(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        tools: Sequence[dict[str, Any]] = (),
        allow_special_tokens: bool,
        **arguments: Any,
    ) -> Text:
        """Returns the prompt, with special tokens where the template wrote them, or anywhere.

        ``variables``: the client's; ``arguments``: further ones of ``apply_chat_template``. Raises
        ApiError: 400 for what the template refuses, 500 where it breaks.
        """
        if self.source is None:
            raise bad_request(
                "messages", "this model's tokenizer has no chat template; use /v1/completions"
            )
        if self._takes_parts:
            messages = [_in_parts(each) for each in messages]
        if allow_special_tokens:
            arguments["tools"] = list(tools) or None
            return self._apply(messages, variables, arguments)
        given = [messages, dict(variables), list(tools)]
        disguise = Disguise(self._spellings, given, self.source)
        messages, variables, tools = disguise.put_on(given)
        arguments["tools"] = tools or None
        return disguise.take_off(self._apply(messages, variables, arguments))

    @cached_property
    def reads_names(self) -> bool:
        """Whether it shows the names of users."""
        return self._shows({**_USER, "name": _PROBE})

    @cached_property
    def takes_text(self) -> bool:
        """Whether it takes a call's arguments as a text, too, not as an object only."""
        function = {"name": "f", "arguments": _PROBE}
        call = {"id": "call_0000", "type": "function", "function": function}
        return self._shows(_USER, {**_USER, "role": "assistant", "tool_calls": [call]})

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether a text is lost unless it comes as a part: templates of models that also take
        images may go through the parts of a content and look for those of text."""
        message = _USER | {"content": _PROBE}
        return not self._shows(message) and self._shows(_in_parts(message))

    def _shows(self, *messages: dict[str, Any]) -> bool:
        try:
            return _PROBE in self._text(list(messages), {}, {})
        except Exception:  # a template may raise whatever Python does
            return False

    def _apply(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> str:
        """Raises ApiError."""
        try:
            return self._text(messages, variables, arguments)
        except Exception as error:  # a template may raise whatever Python does
            if type(error) is TemplateError:  # what templates raise on purpose
                message = f"the chat template refuses the messages: {error}"
                raise bad_request("messages", message) from error
            raise self._blame(error, messages, variables, arguments) from error

    def _text(self, messages: Any, variables: Any, arguments: Any) -> str:
        render = partial(self._tokenizer.apply_chat_template, messages, tokenize=False)
        text = LIMIT.run(lambda: render(**arguments, **variables), self._is_heavy)
        if len(text) > _MOST_CHARS:
            raise ValueError(f"it makes {len(text)} characters of them")
        return text

    def _blame(self, error: Exception, messages: Any, variables: Any, arguments: Any) -> ApiError:
        """The field without which the template works, or the server."""
        continued = "continue_final_message"
        for field, fewer, others in (
            ("chat_template_kwargs", {}, arguments),
            (continued, variables, {**arguments, continued: False}),
        ):
            if (fewer, others) == (variables, arguments):
                continue
            try:
                self._text(messages, fewer, others)
            except Exception:
                continue
            return refused(field, f": the chat template breaks on it: {error}")
        logger.error("the chat template is broken", exc_info=error)
        return ApiError(
            500,
            "This model's chat template is broken; the server's log says how.",
            code="chat_template_error",
        )


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": [{"type": "text", "text": message["content"]}]}


def _known_of(source: str) -> tuple[frozenset[str], bool]:
    """All names that a template reads and does not set, and whether it is heavy to render."""
    environment = Environment(extensions=[jinja2.ext.loopcontrols])
    try:
        tree = environment.parse(_GENERATION.sub("", source))
        heavy = is_heavy(tree)
        for each in tree.find_all(nodes.Const):
            # jinja2 computes with constants already where it looks for names.
            each.value = "" if isinstance(each.value, str) else each.value and 1
        names = meta.find_undeclared_variables(tree) - environment.globals.keys()
    except TemplateSyntaxError as error:
        logger.error("the chat template is broken: %s", error)
        return frozenset(), False
    return frozenset(names), heavy
