"""Operations with a state, as models call them. One file per operation: it registers itself, and all
files here are loaded with the package."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
