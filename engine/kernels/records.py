"""Arguments of kernels: records (``compiled.records``) that Python makes of tensors and numbers.

A kernel declares its arguments once, as a ``NamedTuple`` of annotations, of which the first may be other
records that lie ``Within``; compiled code finds a tensor as the address of its first element.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import cache
from itertools import accumulate, chain
from operator import attrgetter
from struct import Struct
from typing import Annotated, Any, NamedTuple

import torch
from numba import types

from compiled.records import Counter, Pointer, address_of, places_of, record_of, words_of


def elements(element: Any) -> Pointer:
    """Returns the type of a pointer to a tensor's elements: of a type of torch, or a format of weights
    (``formats.Format``). Only float32 are read one by one."""
    return Pointer(element, element.itemsize, types.float32 if element is torch.float32 else None)


Float32s = Annotated[Any, elements(torch.float32)]
Floats = Annotated[Any, "floats"]
"""A tensor of floats of any type: code is compiled for each."""
Formatted = Annotated[Any, "weights of a format"]
"""A tensor of bytes; code is compiled for each format (``formats.Format``), which is said beside it."""
Dtypes = Any
"""Types of the tensors of ``Floats`` in some arguments: one, or a tuple of several, and then the format
of what is ``Formatted``."""


class Layout:
    """How arguments that ``declaration`` declares lie in memory. Raises a TypeError unless records within
    come before other fields and have none within themselves."""

    def __init__(self, declaration: Any) -> None:
        self._declaration, self.places = declaration, places_of(declaration)
        hints = words_of(declaration)
        depths = [name.count(".") for name in hints]
        if depths != sorted(depths, reverse=True) or max(depths) > 1:
            raise TypeError(f"{declaration.__qualname__} has a record within that is not in front")
        self._num_inner = len(declaration._fields) - depths.count(0)
        numbers = (int, bool, float, Counter)
        self._tensors = [place for place, hint in enumerate(hints.values()) if hint not in numbers]
        self._struct = Struct("".join("d" if hint is float else "q" for hint in hints.values()))
        self.floats = [name for name, hint in hints.items() if hint == Floats]
        self._formatted = [name for name, hint in hints.items() if hint == Formatted]
        of_floats = [f"{name}.dtype" for name in self.floats]
        self._dtypes = attrgetter(*of_floats) if of_floats else lambda _: ()

    def record(self, dtypes: Dtypes) -> Pointer:
        """Returns the type in compiled code of arguments whose tensors are of these types."""
        each = dtypes if isinstance(dtypes, tuple) else (dtypes,)
        names = self.floats + self._formatted
        return record_of(self._declaration, **dict(zip(names, map(elements, each), strict=False)))

    def pack(self, arguments: Any) -> tuple[array[int], Dtypes]:
        """Returns ``arguments`` as compiled code reads them, in an int64 for each word, and the types
        that code is compiled for."""
        told = [*arguments]
        if inner := self._num_inner:
            told = [*chain.from_iterable(told[:inner]), *told[inner:]]
        for place in self._tensors:
            told[place] = told[place].data_ptr()
        return array("q", self._struct.pack(*told)), self._dtypes(arguments)


NOWHERE = torch.empty(0)
"""Stands for no tensor: compiled code finds it to be at no address."""
layout_of: Any = cache(Layout)


class Address(NamedTuple):
    """Arguments may have it in a tensor's place. ``held`` owns what is there."""

    address: int
    held: object

    def data_ptr(self) -> int:
        return self.address


def words(arguments: Any) -> array[int]:
    """Returns the record of arguments."""
    layout: Layout = layout_of(type(arguments))
    return layout.pack(arguments)[0]


def packed(arguments: Any) -> Address:
    """Returns what other arguments have a record of, in memory of its own."""
    told = words(arguments)
    return Address(address_of(told), (told, arguments))


def listed(numbers: Iterable[int]) -> Address:
    """Returns where these int64 are: of a few, a tensor takes longer to make."""
    told = array("q", numbers)
    return Address(address_of(told), told)


def rooms(sizes: Iterable[int]) -> list[Address]:
    """Returns where there is room for so many int64, zeros, one after another."""
    starts = [0, *accumulate(sizes)]
    numbers = array("q", bytes(8 * starts.pop()))
    first = address_of(numbers)
    return [Address(first + 8 * start, numbers) for start in starts]
