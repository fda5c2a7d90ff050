"""Compiles loops once for this machine by numba, and keeps the machine code for the next start.

Kernels of the engine and loops of drafters are compiled alike; this part of it needs no torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import operator
import os
import shutil
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, get_args, get_origin, get_type_hints

import numba
from llvmlite import ir
from numba import cfunc, types
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

_DAYS_KEPT = 30

Integers = Annotated[Any, types.CPointer(types.int64)]
Tokens = Annotated[Any, types.CPointer(types.int32)]
Floats = Annotated[Any, types.CPointer(types.float64)]
"""Where numbers of a kind lie."""
_Record = TypeVar("_Record", covariant=True)


class Many(Protocol[_Record]):
    """Where several records lie, one after another."""

    def __getitem__(self, place: int) -> _Record: ...


_NUMBERS = {int: types.int64, float: types.float64}
_WORD = ir.IntType(64)


def version_of(sources: Iterable[Path]) -> str:
    """Returns a name for machine code that is made of these files by this version of numba. By their
    paths, too, since numba takes no code of the same files elsewhere."""
    text = b"".join(os.fsencode(path) + path.read_bytes() for path in sources)
    return hashlib.sha256(text + numba.__version__.encode()).hexdigest()[:16]


def folder_of(version: str) -> Path:
    """Returns where machine code of a version is kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "slipstream" / "kernels" / version


@contextmanager
def kept(version: str, body: Callable[..., Any], *kinds: Any) -> Iterator[bool]:
    """Within it, machine code goes to a folder of that name, after the text of all that it is made of:
    numba itself looks at the one file that a function is in. Waits for a process that compiles ``body``
    for arguments of these types and for this CPU. False: there is no place for it."""
    folder = folder_of(version)
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        can_write = os.access(folder, os.W_OK)
        if can_write:
            os.utime(folder)  # somebody uses it
        if is_new:
            _remove_unused(folder.parent)
    except (OSError, RuntimeError):
        can_write = False
    before = numba.config.CACHE_DIR
    if can_write:
        numba.config.CACHE_DIR = str(folder)
    target = numba.config.CPU_NAME, numba.config.CPU_FEATURES
    what = hashlib.sha256(repr((body.__module__, body.__qualname__, kinds, target)).encode())
    lock = folder / f"{what.hexdigest()[:16]}.lock" if can_write else Path(os.devnull)
    try:
        with lock.open("w") as file:
            with suppress(OSError):  # a file system that locks nothing
                if can_write:
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield can_write
    finally:
        numba.config.CACHE_DIR = before


def _remove_unused(folder: Path) -> None:
    """Removes what no process has taken code from for a month: a version of before. One that still runs
    makes its folder again when it compiles another."""
    oldest = time.time() - _DAYS_KEPT * 24 * 3600
    for version in folder.iterdir():
        with suppress(OSError):
            if version.stat().st_mtime < oldest:
                shutil.rmtree(version, ignore_errors=True)


class Records(types.Type):
    """In compiled code: records that lie one after another. ``declaration`` names their fields, of 8
    bytes each: a number, where numbers lie (``Tokens`` and the like), or where other records do.

    ``r.name`` is read and, where it is a number, written; of several, ``r[n]`` is the n-th.
    """

    def __init__(self, declaration: type) -> None:
        super().__init__(name=f"Records({declaration.__module__}.{declaration.__qualname__})")
        hints = get_type_hints(declaration, include_extras=True)
        self.kinds = {name: kind_of(hint) for name, hint in hints.items()}
        self.places = {name: place for place, name in enumerate(hints)}


@cache
def kind_of(hint: Any) -> Any:
    """Returns the type in compiled code of what is so declared."""
    if hint in _NUMBERS:
        return _NUMBERS[hint]
    if isinstance(hint, type):
        return Records(hint)
    return Records(*get_args(hint)) if get_origin(hint) is Many else hint.__metadata__[0]


class Memory:
    """Records on Python's side: ``count`` that ``declaration`` declares, of zeros, one after another.

    What their fields of another kind than numbers hold are addresses; who sets one sees to it that what
    lies there outlives them.
    """

    __slots__ = ("address", "_fields", "_places")

    def __init__(self, declaration: type, count: int = 1) -> None:
        self._places: Mapping[str, int] = kind_of(declaration).places
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


class Loop:
    """``body`` as machine code, compiled when it is first wanted. ``hints``: of its arguments, as fields
    of records are declared. It returns an integer.

    It is over sooner than another thread would have begun, and keeps the interpreter.
    """

    def __init__(self, body: Callable[..., Any], *hints: Any) -> None:
        self._body, self._kinds = body, [kind_of(hint) for hint in hints]
        self._code: Any = None
        self._call: Callable[..., int] | None = None

    def compile(self) -> Callable[..., int]:
        """Returns the function, which takes addresses as integers. Raises what numba raises."""
        if self._call is None:
            own = Path(self._body.__code__.co_filename).parent
            # A loop may have been made of loops of other folders.
            sources = sorted(
                {*own.glob("*.py"), *Path(__file__).parent.rglob("*_loops.py"), Path(__file__)}
            )
            with kept(version_of(sources), self._body, *self._kinds) as keep:
                self._code = cfunc(types.int64(*self._kinds), cache=keep)(self._body)
            arguments = [ctypes.c_int64] * len(self._kinds)
            self._call = ctypes.PYFUNCTYPE(ctypes.c_int64, *arguments)(self._code.address)
        return self._call


def address_of(numbers: array[Any]) -> int:
    """Returns where numbers lie, until their array grows or goes."""
    return numbers.buffer_info()[0]


# --- in compiled code ---


@register_default(Records)
class _AddressModel(PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _WORD)


@infer_getattr
class _Fields(AttributeTemplate):
    key = Records

    def generic_resolve(self, records: Records, name: str) -> types.Type:
        return records.kinds.get(name)


def _place(context: Any, builder: Any, records: Records, address: Any, name: str) -> Any:
    kind = context.get_value_type(records.kinds[name])
    place = builder.add(address, _WORD(8 * records.places[name]))
    return builder.inttoptr(place, kind.as_pointer())


@lower_getattr_generic(Records)
def _read(context: Any, builder: Any, records: Records, address: Any, name: str) -> Any:
    return builder.load(_place(context, builder, records, address, name))


@lower_setattr_generic(Records)
def _write(context: Any, builder: Any, typed: Any, values: Any, name: str) -> None:
    records = typed.args[0]
    value = context.cast(builder, values[1], typed.args[1], records.kinds[name])
    builder.store(value, _place(context, builder, records, values[0], name))


@infer_global(operator.getitem)
class _Nth(AbstractTemplate):
    def generic(self, given: tuple[Any, ...], _named: Any) -> Any:
        if isinstance(given[0], Records) and isinstance(given[1], types.Integer):
            return signature(given[0], given[0], types.int64)
        return None


@lower_builtin(operator.getitem, Records, types.int64)
def _nth(_context: Any, builder: Any, typed: Any, values: Any) -> Any:
    size = _WORD(8 * len(typed.args[0].places))
    return builder.add(values[0], builder.mul(values[1], size))


@intrinsic
def is_nowhere(_context: Any, records: Any) -> Any:
    """Whether there are no records: their address is 0."""

    def build(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.icmp_signed("==", values[0], _WORD(0))

    return types.boolean(records), build
