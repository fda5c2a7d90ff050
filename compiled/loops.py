"""Loops: functions as machine code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from numba import cfunc, njit, types

from compiled.cache import kept, sources_of, version_of
from compiled.records import kind_of


class Loop:
    """``body`` as machine code, compiled when it is first wanted. Its arguments are annotated as fields
    of records are, or of these ``kinds``; it returns an integer, or nothing.

    Unless it ``is_long`` it is over sooner than another thread of the interpreter would have begun, and
    keeps the interpreter.
    """

    def __init__(self, body: Callable[..., Any], *kinds: types.Type, is_long: bool = False) -> None:
        *arguments, result = get_type_hints(body, include_extras=True).values()
        kinds = kinds or tuple(map(kind_of, arguments))
        self._body, self._signature = body, kind_of(result)(*kinds)
        told: list[Any] = [None if result is type(None) else ctypes.c_int64]
        told += [ctypes.c_int64] * len(kinds)
        self._kind = (ctypes.CFUNCTYPE if is_long else ctypes.PYFUNCTYPE)(*told)
        self._code: Any = None
        self._call: Any = None

    def version(self) -> str:
        """Returns the name of the version of all that it is made of."""
        file = Path(self._body.__code__.co_filename)
        return version_of(sources_of(file, self._body.__module__.partition(".")[0]))

    def compile(self) -> Any:
        """Returns the function, which takes addresses as integers. Raises what numba raises."""
        if self._call is None:
            with kept(self.version(), self._body, *self._signature.args) as keep:
                self._code = cfunc(self._signature, cache=keep)(self._body)
            self._call = self._kind(self._code.address)
        return self._call

    @property
    def address(self) -> int:
        """The address of the machine code."""
        self.compile()
        return int(self._code.address)


def callee(function: Callable[..., Any]) -> Any:
    """Returns ``function`` as other compiled code calls it, compiled once for its types. By ``njit``
    alone it is compiled anew for each constant among its arguments and for each width of integers; that
    pays where a loop is unrolled by the constant."""
    compiled = njit(function)
    template_of = compiled.get_call_template

    def get_call_template(arguments: Iterable[Any], named: Mapping[str, Any]) -> Any:
        named = {name: _variable(kind) for name, kind in named.items()}
        return template_of(tuple(map(_variable, arguments)), named)

    compiled.get_call_template = get_call_template
    return compiled


def _variable(kind: Any) -> Any:
    """Returns the type of a variable that an argument of this one fits into."""
    kind = types.unliteral(kind)
    if isinstance(kind, types.Integer) and kind.signed:
        return types.int64
    if isinstance(kind, types.Tuple):
        return types.BaseTuple.from_types(tuple(map(_variable, kind)))
    return kind
