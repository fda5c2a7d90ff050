"""Tools of ``/v1/responses``, and what the model is shown of them: functions, all in one row.

Tools that other servers run are left aside. A tool whose input is a text is a function with one argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field, JsonValue, PlainValidator, WithJsonSchema

from server.errors import refused
from server.request.body import Body, Hint, WithoutEffect
from server.request.kinds import Kinds, any_of, each_of, one_of, parse_as
from server.request.messages import MAX_TOOLS, NAME_PATTERN, FunctionDefinition


def qualified(name: str, namespace: str | None) -> str:
    """Returns what the model calls a tool: chat templates know no namespaces."""
    if namespace is None:
        return name
    both = f"{namespace.removesuffix('__')}__{name}"
    return both if len(both) <= 64 else f"{both[:55]}_{sha256(both.encode()).hexdigest()[:8]}"


_LOADED: WithoutEffect = {"defer_loading": (False,)}


class FunctionTool(FunctionDefinition):
    """A function that may be called."""

    without_effect: ClassVar[WithoutEffect] = _LOADED

    type: Literal["function"]

    def shown(self) -> FunctionDefinition:
        return self


class TextFormat(Body):
    type: Literal["text", "json_object"]


class GrammarFormat(Body):
    """A regular expression is held to. The model is shown a grammar of Lark's, to which the JSON of a
    call cannot be held."""

    type: Literal["grammar"]
    syntax: Annotated[Literal["lark", "regex"], Hint(does=("regex",))]
    definition: str = Field(min_length=1, max_length=1 << 17)


class CustomTool(Body):
    """A tool whose input is a text: to the model a function with that one argument."""

    without_effect: ClassVar[WithoutEffect] = _LOADED

    type: Literal["custom"]
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    format: Annotated[Any, one_of({"text": TextFormat, "grammar": GrammarFormat})] = None

    def shown(self) -> FunctionDefinition:
        said, text, is_regex = self.description or "", {"type": "string"}, False
        if isinstance(self.format, GrammarFormat):
            is_regex = self.format.syntax == "regex"
            said += f"\n\nThe input matches this {self.format.syntax}:\n{self.format.definition}"
            text |= {"pattern": f"^(?:{self.format.definition})$"} if is_regex else {}
        schema: dict[str, Any] = {"properties": {"input": text}, "required": ["input"]}
        schema |= {"type": "object", "additionalProperties": False}
        return FunctionDefinition.of(description=said.strip(), parameters=schema, strict=is_regex)


_CALLABLE: dict[str, type[Body]] = {"function": FunctionTool, "custom": CustomTool}


class NamespaceTool(Body):
    """Tools with a name before theirs. The model is shown its description with that of its first tool."""

    type: Literal["namespace"]
    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    tools: Annotated[Any, each_of(_CALLABLE)]


_HOSTED = (  # noqa: SIM905
    "apply_patch code_interpreter computer computer_use_preview file_search image_generation "
    "local_shell mcp shell tool_search web_search web_search_2025_08_26 web_search_preview "
    "web_search_preview_2025_03_11"
).split()


class HostedTool(Body):
    """A tool that another server runs, or that its models alone know: this model is not shown it."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, WithJsonSchema({"enum": _HOSTED})]


_TOOLS: Kinds = {**_CALLABLE, "namespace": NamespaceTool, **dict.fromkeys(_HOSTED, HostedTool)}
TOOLS_FIELD = each_of(_TOOLS)


class NamedTool(Body):
    """The one tool to call."""

    type: Literal["function", "custom"]
    name: str = Field(pattern=NAME_PATTERN)
    namespace: str | None = Field(default=None, pattern=NAME_PATTERN)

    def for_chat(self) -> Any:
        return {"type": "function", "function": {"name": qualified(self.name, self.namespace)}}


class AllowedTools(Body):
    """The model is shown these alone."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, JsonValue]] = Field(min_length=1, max_length=MAX_TOOLS)

    def for_chat(self) -> Any:
        return self.mode


_CHOICES: Kinds = {"function": NamedTool, "custom": NamedTool, "allowed_tools": AllowedTools}


_MODES = ("none", "auto", "required")
CHOICE_FIELD = PlainValidator(
    lambda value: value if value in _MODES else parse_as(_CHOICES, value),
    json_schema_input_type=Literal[_MODES] | any_of(_CHOICES),
)


class ShownTool(NamedTuple):
    """A tool as the model is shown it. ``place``: the tool's field; ``call``: what an item that calls it
    begins with."""

    shown: FunctionDefinition
    place: str
    call: dict[str, str]

    @classmethod
    def of(
        cls, tool: FunctionTool | CustomTool, place: str, group: NamespaceTool | None, about: str
    ) -> ShownTool:
        """``about``: what is said before the tool's own description."""
        kind = "custom_tool_call" if isinstance(tool, CustomTool) else "function_call"
        namespace = None if group is None else group.name
        call = {"type": kind, "name": tool.name} | ({"namespace": namespace} if namespace else {})
        shown = FunctionDefinition.of(
            name=qualified(tool.name, namespace),
            description=f"{about}\n\n{tool.shown().description or ''}".strip(),
            parameters=tool.shown().parameters,
            strict=tool.shown().strict,
        )
        return cls(shown, place, call)

    def names(self, tool: str) -> dict[str, str]:
        """The paths of its fields by those of the chat's ``tool``."""
        found = {f"{tool}.function": self.place}
        if self.call["type"] == "custom_tool_call":
            # The schema around a pattern is of our making.
            schema = f"{tool}.function.parameters"
            found |= dict.fromkeys((schema, f"{schema}.*"), f"{self.place}.format.definition")
        return found

    def is_called(self, name: object) -> bool:
        """Whether that is its own name, or its namespace's."""
        return name in (self.call["name"], self.call.get("namespace"))


def shown_tools(tools: Sequence[Body], choice: object) -> list[ShownTool]:
    """The tools that the model is shown. Raises ApiError 400."""
    found = []
    for index, tool in enumerate(tools):
        if isinstance(tool, FunctionTool | CustomTool):
            found.append(ShownTool.of(tool, f"tools.{index}", None, ""))
        elif isinstance(tool, NamespaceTool):
            for at, each in enumerate(tool.tools):
                about = "" if at else tool.description or ""
                found.append(ShownTool.of(each, f"tools.{index}.tools.{at}", tool, about))
    if isinstance(choice, AllowedTools):
        names = {place: each["name"] for place, each in enumerate(choice.tools) if each.get("name")}
        for place, name in names.items():
            if not any(each.is_called(name) for each in found):
                raise refused(f"tool_choice.tools.{place}.name", ": none of 'tools' has it")
        found = [each for each in found if any(map(each.is_called, names.values()))]
        if not found:
            raise refused("tool_choice.tools", ": none of them is among 'tools'")
    return found
