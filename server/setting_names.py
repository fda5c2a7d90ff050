"""The names of settings as flags, as variables and in files, and errors for other names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

PREFIX = "SLIPSTREAM_"
NESTED = "__"
OTHER_VARIABLES: Mapping[str, str] = {
    "SLIPSTREAM_URL": "address of the server, for the terminal client",
    "SLIPSTREAM_RANKS_STORE": "where ranks that an engine launched find each other",
    "SLIPSTREAM_BIND": "of deploy/compose.yaml",
    "SLIPSTREAM_CORES": "of deploy/compose.yaml",
    "SLIPSTREAM_MEMORY": "of deploy/compose.yaml",
}
"""Variables with the prefix of settings that are none: what else the project reads."""

Path = tuple[str, ...]


def all_settings(
    model: type[BaseModel], prefix: Path = (), with_groups: bool = False
) -> Iterator[tuple[Path, FieldInfo]]:
    """Every setting with its path: those of nested models, too. ``with_groups``: and these as a whole."""
    for name, field in model.model_fields.items():
        kind = group_of(field)
        if kind is None or with_groups:
            yield (*prefix, name), field
        if kind is not None:
            yield from all_settings(kind, (*prefix, name), with_groups)


def group_of(field: FieldInfo) -> type[BaseModel] | None:
    """Returns the model of a group of settings; None for a setting."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def flag_name(path: Sequence[str]) -> str:
    return f"--{'.'.join(path).replace('_', '-')}"


def variable_name(path: Sequence[str]) -> str:
    return PREFIX + NESTED.join(path).upper()


def unknown_variables(model: type[BaseModel], names: Iterable[str]) -> list[str]:
    """Returns what to say of each of the environment's variables that has the prefix of settings and is
    none. Letters may be small, as for those that are some."""
    names = {name.upper() for name in names}
    places = (path for path, _ in all_settings(model, with_groups=True))
    known = set(map(variable_name, places)) | OTHER_VARIABLES.keys()
    found = []
    for name in sorted(names - known - _service_links(names)):
        path = tuple(name.removeprefix(PREFIX).lower().split(NESTED))
        if name.startswith(PREFIX) and not _is_within_a_mapping(model, path):
            near = _near(name, map(variable_name, _leaves(model)))
            found.append(f"variable {name}: no such setting{near}")
    return found


def unknown_names(model: type[BaseModel], values: Mapping[str, Any]) -> list[str]:
    """Returns what to say of each name in a file, at any depth, that no setting has."""
    found = []
    for path in _unknown_paths(model, values, ()):
        name = ".".join(path)
        found.append(f"{name}: no such setting{_near(name, map('.'.join, _leaves(model)))}")
    return found


def unknown_flag(given: str, flags: Iterable[str]) -> str:
    """Returns what to say of a flag that there is not."""
    name = given.partition("=")[0]
    return f"there is no flag {name}{_near(name, flags)}"


def with_field_names(model: type[BaseModel], values: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns what a file says, its names spelled as fields are: files may spell them as flags do. Raises
    ValueError where a name is there in both spellings."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name in found:
            raise ValueError(f"{name} is there in two spellings")
        field = model.model_fields.get(name)
        kind = None if field is None else group_of(field)
        is_group = kind is not None and isinstance(value, Mapping)
        found[name] = with_field_names(kind, value) if is_group else value  # type: ignore[arg-type]
    return found


def _leaves(model: type[BaseModel]) -> list[Path]:
    return [path for path, _ in all_settings(model)]


def _unknown_paths(
    model: type[BaseModel], values: Mapping[str, Any], prefix: Path
) -> Iterator[Path]:
    for name, value in values.items():
        field = model.model_fields.get(name)
        if field is None:
            yield (*prefix, name)
            continue
        kind = group_of(field)
        if kind is not None and isinstance(value, Mapping):
            yield from _unknown_paths(kind, value, (*prefix, name))


def _is_within_a_mapping(model: type[BaseModel], path: Path) -> bool:
    """Whether the path leads into a setting that takes names of its own."""
    return any(
        get_origin(kind) is dict
        for place, field in all_settings(model)
        if place == path[: len(place)] and place != path
        for kind in (field.annotation, *get_args(field.annotation))
    )


def _near(name: str, known: Iterable[str]) -> str:
    """Names the one that may be meant: nested elsewhere, or spelled nearly so."""
    short = {_compared(each): each for each in known}
    nested = [each for each in short if re.split(rf"{NESTED}|\.", each)[-1] == _compared(name)]
    near = nested or get_close_matches(_compared(name), short, 1, 0.7)
    return f"; did you mean {short[near[0]]}?" if near else ""


def _compared(name: str) -> str:
    return name.upper().removeprefix(PREFIX).removeprefix("--").replace("-", "_")


def _service_links(names: set[str]) -> set[str]:
    """Returns the variables that Kubernetes sets for Services of the namespace whose names begin with the
    project's. For one with just that name a link is called like the setting ``port``, too: its value is
    a URL, which no port is."""
    found: set[str] = set()
    for name in names:
        service = re.fullmatch(rf"({PREFIX}(\w+_)?)SERVICE_HOST", name)
        if service is not None and f"{service[1]}SERVICE_PORT" in names:
            link = re.compile(
                rf"{service[1]}(SERVICE_(HOST|PORT(_\w+)?)"
                r"|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
            )
            found |= {each for each in names if link.fullmatch(each)}
    return found
