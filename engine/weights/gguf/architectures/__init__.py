"""GGUF's architectures as models of transformers: one entry for each, by the value of a file's
general.architecture, in the ``ARCHITECTURES`` of any module here.

Names of tensors are ``gguf``'s, keys are in ``configuration.py``. An entry has what is left: the type of
model, what the conversion did to values and orders, and what llama.cpp knows without being told.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from engine.weights.gguf.architecture import Architecture

ARCHITECTURES: dict[str, Architecture] = {}
for _module in iter_modules(__path__):
    _own = import_module(f"{__name__}.{_module.name}").ARCHITECTURES
    if _twice := sorted(ARCHITECTURES.keys() & _own):
        raise ValueError(
            f"architectures/{_module.name}.py has {_twice[0]!r}, and so has another file"
        )
    ARCHITECTURES |= _own
