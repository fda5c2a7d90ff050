"""Tools that a request offers, what it says about their use, and calls in messages of the past."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, JsonValue, PlainValidator, WithJsonSchema

from server.request.body import Body, refusal

MAX_TOOLS = 128
NAME_PATTERN = "^[A-Za-z0-9_-]{1,64}$"
_MODES = ("none", "auto", "required")


def _check_parameters(schema: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if schema.get("type", "object") != "object":
        raise ValueError("arguments are an object, so the schema's 'type' is 'object'")
    if not isinstance(schema.get("properties", {}), dict):
        raise ValueError("'properties' is an object of schemas")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise ValueError("'required' is a list of names")
    return schema


ParametersField = Annotated[
    dict[str, JsonValue],
    AfterValidator(_check_parameters),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"const": "object"},
                "properties": {"type": "object"},
                "required": {"type": "array", "items": {"type": "string"}},
            },
        }
    ),
]


class FunctionDefinition(Body):
    """``strict``: whenever the function is called, its arguments match the schema."""

    name: str = Field(pattern=NAME_PATTERN)
    description: str | None = None
    parameters: ParametersField | None = Field(
        default=None, description="JSON schema of the arguments; default: any object."
    )
    strict: bool | None = None

    def schema_of_arguments(self) -> dict[str, JsonValue]:
        return {"type": "object", **(self.parameters or {"properties": {}})}

    def for_template(self) -> dict[str, JsonValue]:
        """As chat templates expect it."""
        told: dict[str, JsonValue] = {
            "name": self.name,
            "parameters": self.schema_of_arguments(),
        }
        return told if self.description is None else told | {"description": self.description}


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


def _check_names(tools: list[Tool]) -> list[Tool]:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in seen:
            name = tool.function.name
            raise refusal(index, "function", "name", message=f"{name!r} is there twice")
        seen.add(tool.function.name)
    return tools


ToolsField = Annotated[list[Tool], AfterValidator(_check_names)]


class _NamedFunction(Body):
    name: str


class NamedTool(Body):
    """The one function to call."""

    unsupported: ClassVar[dict[str, str]] = {
        "allowed_tools": "send only the tools that may be called",
        "custom": "functions only",
    }

    type: Literal["function"]
    function: _NamedFunction


def _parse_tool_choice(value: object) -> str | NamedTool:
    if isinstance(value, str) and value in _MODES:
        return value
    if isinstance(value, dict):
        return NamedTool.model_validate(value)
    raise ValueError("must be 'none', 'auto', 'required' or an object that names a function")


ToolChoiceField = Annotated[
    Any,
    PlainValidator(
        _parse_tool_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | NamedTool | None,
    ),
]


class _CalledFunction(Body):
    name: str = Field(min_length=1, max_length=128)
    arguments: str = Field(description="JSON text of an object.")


class MessageToolCall(Body):
    """A call that the assistant made before."""

    unsupported: ClassVar[dict[str, str]] = {"custom": "functions only"}

    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: _CalledFunction
