"""Messages of Anthropic's API, which are lists of blocks, and the messages of a chat that say the
same: a tool's result, a block of the user's message here, is a message of its own there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from server.request.body import Body, WithoutEffect, refusal
from server.request.foreign_parts import ForeignPart, find_foreign_part
from server.request.kinds import Kinds, any_of, parse_as
from server.request.messages import CACHED, ArgumentsField, MessageToolCall, TextPart, text_of

_NOTHING_RUNS = "no tool runs here; its results come from the client, as 'tool_result'"
_ACCOUNT_LINE = "x-anthropic-billing-header:"
"""The line that agents put at the front of a system prompt for Anthropic's accounts. It differs from
session to session, so with it no session would find another's prompt in the cache."""


class Block(Body):
    """The fields of all blocks."""

    without_effect: ClassVar[WithoutEffect] = CACHED | {"index": ()}


class _TextSource(Body):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class _BlocksSource(Body):
    type: Literal["content"]
    content: str | list[TextPart]


class _Citations(Body):
    fixed: ClassVar[dict[str, tuple[Any, ...]]] = {"enabled": (False,)}


class DocumentBlock(Block):
    """A document that comes as text; the model is shown its title, what is said of it, and the text."""

    type: Literal["document"]
    source: _TextSource | _BlocksSource = Field(discriminator="type")
    title: str | None = None
    context: str | None = None
    citations: _Citations | None = None

    @model_validator(mode="before")
    @classmethod
    def _comes_as_text(cls, data: Any) -> Any:
        source = data.get("source") if isinstance(data, dict) else None
        kind = source.get("type") if isinstance(source, dict) else None
        if kind in ("base64", "url", "file"):
            message = f"{kind!r}: files are not read here; send their text, as type 'text'"
            raise refusal("source", "type", message=message)
        return data

    @property
    def text(self) -> str:
        source = self.source
        said = source.data if isinstance(source, _TextSource) else text_of(source.content)
        return "\n".join(each for each in (self.title, self.context, said) if each)


class ThinkingBlock(Body):
    """``signature`` is taken as it comes: thoughts may be of another model."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """Thoughts that only their author can read; the model is told nothing of them."""

    type: Literal["redacted_thinking"]
    data: str


class _DirectCaller(Body):
    type: Literal["direct"]


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=128)
    input: ArgumentsField
    caller: _DirectCaller | None = None


def _blocks(kinds: Kinds) -> Any:
    """A validator of a content: text, blocks of these kinds, or the first that is no text at all."""

    def parse(value: object) -> Any:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("must be a text or a list of blocks")
        return find_foreign_part(value) or [
            _parse_block(kinds, index, each) for index, each in enumerate(value)
        ]

    union: Any = any_of(kinds)
    return PlainValidator(parse, json_schema_input_type=str | list[union])


def _parse_block(kinds: Kinds, index: int, block: object) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and (kind in _SERVER_BLOCKS or kind.endswith("_tool_result")):
        message = f"{kind!r} is not supported: {_NOTHING_RUNS}"
        raise refusal(index, "type", message=message)
    return parse_as(kinds, block, at=[index])


_SERVER_BLOCKS = ("server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload")
_OF_RESULTS: Kinds = {"text": TextPart, "document": DocumentBlock}


class ToolResultBlock(Block):
    """``is_error``: the model is told by the word "Error:" before the text."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: Annotated[Any, _blocks(_OF_RESULTS)] = ""
    is_error: bool = False

    @property
    def text(self) -> str:
        return f"Error: {text_of(self.content)}" if self.is_error else text_of(self.content)


_KINDS: Kinds = {
    "text": TextPart,
    "document": DocumentBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}
_OF_ROLES = {
    "user": ("text", "document", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
SystemField = Annotated[Any, _blocks({"text": TextPart})]


class InputMessage(Body):
    """``system``: instructions that hold from here on. Some clients send a reply back whole."""

    without_effect: ClassVar[WithoutEffect] = dict.fromkeys(
        ("name", "id", "type", "model", "stop_reason", "stop_sequence", "usage", "container"), ()
    )

    role: Literal["user", "assistant", "system"]
    content: Annotated[Any, _blocks(_KINDS)]

    @model_validator(mode="after")
    def _suits_its_role(self) -> Self:
        for index, block in enumerate(self.blocks):
            if block.type not in _OF_ROLES[self.role]:
                message = f"messages of {self.role!r} have no place for {block.type!r}"
                raise refusal("content", index, "type", message=message)
        return self

    @property
    def blocks(self) -> Sequence[Any]:
        if isinstance(self.content, str):
            return [TextPart(type="text", text=self.content)]
        return [] if isinstance(self.content, ForeignPart) else self.content


def system_text(content: str | list[TextPart]) -> str:
    """The system prompt, without the line that is for Anthropic's books."""
    blocks = [content] if isinstance(content, str) else [each.text for each in content]
    return "\n".join(each for each in blocks if not each.startswith(_ACCOUNT_LINE))


@dataclass(frozen=True, slots=True)
class Turn:
    """The fields of a chat's message, and the field that it came from."""

    message: dict[str, Any]
    field: str


def turns(messages: Sequence[InputMessage]) -> list[Turn]:
    """The messages of a chat that say the same."""
    found: list[Turn] = []
    for index, message in enumerate(messages):
        for told in _for_chat(message):
            last = found[-1].message if found else {}
            if told["role"] == last.get("role") and told["role"] in ("user", "assistant"):
                _append(last, told)
            else:
                found.append(Turn(told, f"messages.{index}.content"))
    return found


def _append(turn: dict[str, Any], more: dict[str, Any]) -> None:
    """One side goes on."""
    for name in (each for each in more.keys() - {"role"} if more[each]):
        between = [] if name == "tool_calls" else "\n"
        turn[name] = turn[name] + between + more[name] if turn.get(name) else more[name]


def _for_chat(message: InputMessage) -> Iterator[dict[str, Any]]:
    if message.role == "assistant":
        yield _assistant(message.blocks)
        return
    texts: list[str] = []
    for block in message.blocks:
        if not isinstance(block, ToolResultBlock):
            texts.append(block.text)
            continue
        if texts:
            yield {"role": message.role, "content": "\n".join(texts)}
            texts = []
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}
    if texts or not message.blocks:
        yield {"role": message.role, "content": "\n".join(texts)}


def _assistant(blocks: Sequence[Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"role": "assistant"}
    told["content"] = "\n".join(each.text for each in blocks if isinstance(each, TextPart))
    thoughts = [each.thinking for each in blocks if isinstance(each, ThinkingBlock)]
    if any(thoughts):
        told["reasoning_content"] = "\n".join(thoughts)
    calls = [
        MessageToolCall.to(each.name, each.input, each.id)
        for each in blocks
        if isinstance(each, ToolUseBlock)
    ]
    return told | ({"tool_calls": calls} if calls else {})
