"""The tokenizer's chat template: which variables it reads, what it makes of messages, and who is to
blame where it makes nothing of them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2.ext
from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta

from server.errors import ApiError, bad_request, refused
from server.request.special_tokens import Disguise, Piece, Spellings

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
# transformers' own tags; what stands between them is as it was.
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


class ChatTemplate:
    """Of a tokenizer of transformers'."""

    def __init__(self, tokenizer: Any, spellings: Spellings) -> None:
        self._tokenizer = tokenizer
        self._spellings = spellings
        self._source = str(tokenizer.chat_template) if tokenizer.chat_template else None
        self._variables = _variables(self._source or "")
        self._takes_tools = "tools" in self._variables
        self._variables -= _NOT_THE_CLIENTS | tokenizer.special_tokens_map.keys()

    def render(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        tools: Sequence[dict[str, Any]] = (),
        allow_special_tokens: bool,
        **arguments: Any,
    ) -> list[Piece]:
        """Returns the text in pieces.

        ``variables``: the client's; ``arguments``: further ones of ``apply_chat_template``. Raises
        ApiError: 400 for what the template refuses, 500 where it breaks.
        """
        if self._source is None:
            raise bad_request(
                "messages", "this model's tokenizer has no chat template; use /v1/completions"
            )
        for name in variables:
            if name not in self._variables:
                field = f"chat_template_kwargs.{name}"
                raise refused(field, ": the chat template has no such variable")
        if tools and not self._takes_tools:
            raise refused("tools", ": this model's chat template has no place for them")
        if allow_special_tokens:
            arguments["tools"] = list(tools) or None
            return [(True, self._apply(messages, variables, arguments))]
        given = [messages, dict(variables), list(tools)]
        disguise = Disguise(self._spellings, given, self._source)
        messages, variables, tools = disguise.put_on(given)
        arguments["tools"] = tools or None
        return disguise.take_off(self._apply(messages, variables, arguments))

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
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, **arguments, **variables
        )
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


def _variables(source: str) -> frozenset[str]:
    """All names that a template reads and does not set."""
    environment = Environment(extensions=[jinja2.ext.loopcontrols])
    try:
        tree = environment.parse(_GENERATION.sub("", source))
    except TemplateSyntaxError as error:
        logger.error("the chat template is broken: %s", error)
        return frozenset()
    return frozenset(meta.find_undeclared_variables(tree) - environment.globals.keys())
