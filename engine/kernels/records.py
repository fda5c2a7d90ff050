"""The types of what kernels are told: pointers that know their elements, and records of named fields.

A kernel declares its arguments once, as a ``NamedTuple`` of the annotations below. Python makes one of
numbers and tensors; compiled code reads its fields by name. Between the two it is an array of 8 bytes for
each field: a number, or the address of a tensor, which may hold records itself. Addresses are integers
here and below, nowhere above.
"""

from __future__ import annotations

import operator
from array import array
from functools import cache
from operator import attrgetter
from struct import Struct
from typing import Annotated, Any, get_type_hints

import torch
from llvmlite import ir
from numba import types
from numba.core.datamodel import register_default
from numba.core.datamodel.models import PrimitiveModel
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_global, signature
from numba.extending import infer_getattr, lower_builtin, lower_getattr_generic

_INT64 = ir.IntType(64)
_SCALARS = {
    torch.float32: types.float32,
    torch.float64: types.float64,
    torch.uint8: types.uint8,
    torch.int32: types.int32,
    torch.int64: types.int64,
}
"""Elements that compiled code reads and writes one by one."""


class Pointer(types.Type):
    """Points to elements that lie one after another: numbers of a type of torch, or records that a
    declaration declares. ``p + n`` points to the n-th of them; ``p[n]`` is that one, where it is a record
    or ``_SCALARS`` has its type."""

    def __init__(self, element: Any) -> None:
        super().__init__(name=f"Pointer({element})")
        self.element = element
        is_record = isinstance(element, type)
        self.itemsize = 8 * len(element._fields) if is_record else element.itemsize
        self.scalar = Record(element) if is_record else _SCALARS.get(element)


Counter = Annotated[int, "a counter"]
"""A number that threads count with; in compiled code, a pointer to it."""
Floats = Annotated[Any, "floats"]
"""A tensor of floats of any type: code is compiled for each."""
Formatted = Annotated[Any, "weights of a format"]
"""A tensor of bytes; code is compiled for each format (``formats.Format``), which is said beside it."""
Float32s = Annotated[Any, Pointer(torch.float32)]
Float64s = Annotated[Any, Pointer(torch.float64)]
Int64s = Annotated[Any, Pointer(torch.int64)]
Bytes = Annotated[Any, Pointer(torch.uint8)]
"""Tensors of one type each."""

_NUMBERS = {int: types.int64, bool: types.int64, float: types.float64}
Dtypes = Any
"""Types of the tensors of ``Floats`` in some arguments: one, or a tuple of several."""


class Layout:
    """How arguments that ``declaration`` declares lie in memory: tensors, then numbers, of 8 bytes each.
    Raises a TypeError for a declaration in another order: what a launch takes is what C takes."""

    def __init__(self, declaration: Any) -> None:
        self.hints = get_type_hints(declaration, include_extras=True)
        self.places = {name: place for place, name in enumerate(self.hints)}
        are_numbers = [hint in _NUMBERS or hint == Counter for hint in self.hints.values()]
        if are_numbers != sorted(are_numbers):
            raise TypeError(f"{declaration.__qualname__} has a tensor after a number")
        self._num_tensors = are_numbers.count(False)
        self._struct = Struct(
            "".join("d" if hint is float else "q" for hint in self.hints.values())
        )
        self.floats = [name for name, hint in self.hints.items() if hint == Floats]
        of_floats = [f"{name}.dtype" for name in self.floats]
        self._dtypes = attrgetter(*of_floats) if of_floats else lambda _: ()

    def type_of(self, name: str, dtypes: Dtypes) -> types.Type:
        """The type in compiled code of the field ``name``."""
        hint = self.hints[name]
        each = dtypes if isinstance(dtypes, tuple) else (dtypes,)
        if hint == Floats:
            return Pointer(each[self.floats.index(name)])
        if hint == Formatted:
            return Pointer(each[-1])
        if hint == Counter:
            return Pointer(torch.int64)
        return _NUMBERS.get(hint) or hint.__metadata__[0]

    def pack(self, arguments: Any) -> tuple[array[int], Dtypes]:
        """Returns ``arguments`` as compiled code reads them, in an int64 for each field, and the types
        that code is compiled for."""
        tensors, numbers = arguments[: self._num_tensors], arguments[self._num_tensors :]
        told = self._struct.pack(*map(_address_of, tensors), *numbers)
        return array("q", told), self._dtypes(arguments)


_address_of = torch.Tensor.data_ptr
NOWHERE = torch.empty(0)
"""Stands for no tensor: compiled code finds it to be at no address."""
layout_of: Any = cache(Layout)


def packed(arguments: Any) -> torch.Tensor:
    """Returns what other arguments have a ``Record`` of, in memory of its own."""
    layout: Layout = layout_of(type(arguments))
    return torch.frombuffer(layout.pack(arguments)[0], dtype=torch.int64)


class Record(types.Type):
    """Arguments that ``declaration`` declares, whose tensors of ``Floats`` have ``dtypes``."""

    def __init__(self, declaration: Any, dtypes: Dtypes = ()) -> None:
        super().__init__(name=f"{declaration.__module__}.{declaration.__qualname__}({dtypes})")
        self.declaration, self.dtypes = declaration, dtypes


# --- in compiled code ---


@register_default(Pointer)
@register_default(Record)
class _AddressModel(PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _INT64)


@infer_getattr
class _RecordFields(AttributeTemplate):
    key = Record

    def generic_resolve(self, record: Record, name: str) -> types.Type:
        return layout_of(record.declaration).type_of(name, record.dtypes)


@lower_getattr_generic(Record)
def _read_field(context: Any, builder: Any, record: Record, address: Any, name: str) -> Any:
    layout = layout_of(record.declaration)
    place = builder.add(address, _INT64(8 * layout.places[name]))
    if layout.hints[name] == Counter:
        return place
    kind = context.get_value_type(layout.type_of(name, record.dtypes))
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=8)


def element_at(builder: Any, pointer: Pointer, address: Any, index: Any) -> Any:
    return builder.add(address, builder.mul(index, _INT64(pointer.itemsize)))


@infer_global(operator.add)
class _Further(AbstractTemplate):
    def generic(self, given: tuple[Any, ...], _named: Any) -> Any:
        if isinstance(given[0], Pointer) and isinstance(given[1], types.Integer):
            return signature(given[0], given[0], types.int64)
        return None


@lower_builtin(operator.add, Pointer, types.int64)
def _move(_context: Any, builder: Any, typed: Any, values: Any) -> Any:
    return element_at(builder, typed.args[0], *values)


@infer_global(operator.getitem)
class _Read(AbstractTemplate):
    def generic(self, given: tuple[Any, ...], _named: Any) -> Any:
        if isinstance(given[0], Pointer) and isinstance(given[1], types.Integer):
            return signature(given[0].scalar, given[0], types.int64)
        return None


def _scalar_at(context: Any, builder: Any, typed: Any, address: Any, index: Any) -> Any:
    pointer = typed.args[0]
    kind = context.get_value_type(pointer.scalar)
    return builder.inttoptr(element_at(builder, pointer, address, index), kind.as_pointer())


@lower_builtin(operator.getitem, Pointer, types.int64)
def _read(context: Any, builder: Any, typed: Any, values: Any) -> Any:
    if isinstance(typed.return_type, Record):
        return element_at(builder, typed.args[0], *values)
    return builder.load(_scalar_at(context, builder, typed, *values))


@infer_global(operator.setitem)
class _Write(AbstractTemplate):
    def generic(self, given: tuple[Any, ...], _named: Any) -> Any:
        if isinstance(given[0], Pointer) and isinstance(given[1], types.Integer):
            return signature(types.none, given[0], types.int64, given[0].scalar)
        return None


@lower_builtin(operator.setitem, Pointer, types.int64, types.Any)
def _write(context: Any, builder: Any, typed: Any, values: Any) -> Any:
    builder.store(values[2], _scalar_at(context, builder, typed, *values[:2]))
