"""Compiled loops are told numbers, where numbers lie, and records of named fields.

Records are declared once, as a class of annotations, and lie in memory as 8 bytes for each field: a
number, or the address of what lies elsewhere: numbers (``Int64s`` and the like), another record (its
class) or several, one after another (a ``Sequence`` of it). A record ``Within`` another takes as many
bytes as its own fields. Compiled code reads and writes fields by name. Addresses are integers on Python's
side, nowhere in compiled code.
"""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from llvmlite import ir
from numba import types
from numba.core.datamodel import register_default
from numba.core.datamodel.models import PrimitiveModel
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_global, signature
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_builtin,
    lower_getattr_generic,
    lower_setattr_generic,
)

_WORD = ir.IntType(64)
_KINDS = {int: types.int64, bool: types.int64, float: types.float64, type(None): types.void}


class Pointer(types.Type):
    """In compiled code: points to elements that lie one after another, numbers of the type ``number`` or
    records of ``fields``: by their names offset, type, and whether the record itself has what that points
    to. ``p + n`` points to the n-th; ``p[n]`` is that number, or points to that record; ``p.name`` is a
    field of the first. Of what is neither, only where it lies is known."""

    def __init__(self, element: Any, itemsize: int, number: Any = None, fields: Any = ()) -> None:
        super().__init__(name=f"Pointer({element})")
        self.element, self.itemsize = element, itemsize
        self.number, self.fields = number, dict(fields)


def _numbers(number: types.Type) -> Pointer:
    return Pointer(number, number.bitwidth // 8, number)


Bytes = Annotated[Any, _numbers(types.uint8)]
Int32s = Annotated[Any, _numbers(types.int32)]
Int64s = Annotated[Any, _numbers(types.int64)]
Float64s = Annotated[Any, _numbers(types.float64)]
"""Where numbers of a kind lie."""
Counter = Annotated[int, _numbers(types.int64)]
"""A number that threads count with; in compiled code, a pointer to it."""


_Record = TypeVar("_Record")
Within = Annotated[_Record, "within"]
"""A record that lies in the one whose field it is; in compiled code, a pointer to it."""


def inner_of(hint: Any) -> Any:
    """Returns the declaration of what lies ``Within``, or None."""
    return hint.__origin__ if getattr(hint, "__metadata__", None) == Within.__metadata__ else None


def words_of(declaration: type, before: str = "") -> dict[str, Any]:
    """Returns how each 8 bytes are annotated, by names: as ``outer.inner`` for what lies within."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(declaration, include_extras=True).items():
        inner = inner_of(hint)
        found |= words_of(inner, f"{before}{name}.") if inner else {before + name: hint}
    return found


def record_of(declaration: type, before: str = "", **kinds: types.Type) -> Pointer:
    """Returns the type of a pointer to what ``declaration`` declares. ``kinds``: those of words whose
    annotations leave them open, by their names, which have this ``before`` them."""
    fields, size = {}, 0
    for name, hint in get_type_hints(declaration, include_extras=True).items():
        if inner := inner_of(hint):
            kind = record_of(inner, f"{before}{name}.", **kinds)
        else:
            kind = kinds.get(before + name) or kind_of(hint)
        fields[name] = size, kind, inner is not None or hint == Counter
        size += kind.itemsize if inner else 8
    title = f"{declaration.__module__}.{declaration.__qualname__}({before}{kinds})"
    return Pointer(title, size, fields=fields)


@cache
def kind_of(hint: Any) -> Any:
    """Returns the type in compiled code of what is so annotated."""
    if hint in _KINDS:
        return _KINDS[hint]
    if get_origin(hint) is Sequence:
        (hint,) = get_args(hint)
    return record_of(hint) if isinstance(hint, type) else hint.__metadata__[0]


class Memory:
    """Records on Python's side: ``count`` that ``declaration`` declares, of zeros, one after another.

    What their fields of another kind than numbers hold are addresses; who sets one sees to it that what
    lies there outlives them.
    """

    __slots__ = ("address", "_fields", "_places")

    def __init__(self, declaration: type, count: int = 1) -> None:
        self._places = places_of(declaration)
        self._fields = array("q", bytes(8 * len(self._places) * count))
        self.address = address_of(self._fields)

    def __getitem__(self, name: str) -> int:
        """Returns a field of the first record, an integer or an address."""
        return self._fields[self._places[name]]

    def __setitem__(self, name: str, value: int) -> None:
        self._fields[self._places[name]] = value

    def fill(self, *values: int) -> None:
        """Sets the first fields of the first record, in the order in which they are declared."""
        self._fields[: len(values)] = array("q", values)

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + sys.getsizeof(self._fields)


@cache
def places_of(declaration: type) -> dict[str, int]:
    """Returns each word's number."""
    return {name: place for place, name in enumerate(words_of(declaration))}


def address_of(numbers: array[Any]) -> int:
    """Returns where numbers lie, until their array grows or goes."""
    return numbers.buffer_info()[0]


# --- in compiled code ---


@register_default(Pointer)
class _AddressModel(PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _WORD)


@infer_getattr
class _Fields(AttributeTemplate):
    key = Pointer

    def generic_resolve(self, pointer: Pointer, name: str) -> types.Type | None:
        return pointer.fields.get(name, (0, None))[1]


def _as_pointer(context: Any, builder: Any, address: Any, kind: types.Type) -> Any:
    return builder.inttoptr(address, context.get_value_type(kind).as_pointer())


@lower_getattr_generic(Pointer)
def _read_field(context: Any, builder: Any, pointer: Any, address: Any, name: str) -> Any:
    offset, kind, is_inside = pointer.fields[name]
    place = builder.add(address, _WORD(offset))
    return place if is_inside else builder.load(_as_pointer(context, builder, place, kind))


@lower_setattr_generic(Pointer)
def _write_field(context: Any, builder: Any, typed: Any, values: Any, name: str) -> None:
    offset, kind, _ = typed.args[0].fields[name]
    place = _as_pointer(context, builder, builder.add(values[0], _WORD(offset)), kind)
    builder.store(context.cast(builder, values[1], typed.args[1], kind), place)


def _move(_context: Any, builder: Any, typed: Any, values: Any) -> Any:
    size = _WORD(typed.args[0].itemsize)
    return builder.add(values[0], builder.mul(values[1], size))


def _place(context: Any, builder: Any, typed: Any, values: Any) -> Any:
    # With an address that is a sum LLVM would make half as much of a loop.
    first = _as_pointer(context, builder, values[0], typed.args[0].number)
    return builder.gep(first, values[1:2])


def _read(context: Any, builder: Any, typed: Any, values: Any) -> Any:
    if typed.args[0].fields:
        return _move(context, builder, typed, values)
    return builder.load(_place(context, builder, typed, values))


def _write(context: Any, builder: Any, typed: Any, values: Any) -> None:
    builder.store(values[2], _place(context, builder, typed, values))


def _define(operation: Any, typed: Callable[[Pointer], Any], emit: Callable[..., Any]) -> None:
    """``operation`` takes a pointer and an integer, with the signature that ``typed`` returns."""

    @infer_global(operation)
    class _Operation(AbstractTemplate):
        def generic(self, given: tuple[Any, ...], _named: Any) -> Any:
            is_ours = isinstance(given[0], Pointer) and isinstance(given[1], types.Integer)
            return typed(given[0]) if is_ours else None

    lower_builtin(operation, Pointer, types.int64, types.VarArg(types.Any))(emit)


_define(operator.add, lambda p: signature(p, p, types.int64), _move)
_define(operator.getitem, lambda p: signature(p if p.fields else p.number, p, types.int64), _read)
_define(operator.setitem, lambda p: signature(types.none, p, types.int64, p.number), _write)


@intrinsic
def is_nowhere(_context: Any, pointer: Any) -> Any:
    """Whether there is nothing that it points to: its address is 0."""

    def build(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.icmp_signed("==", values[0], _WORD(0))

    return types.boolean(pointer), build
