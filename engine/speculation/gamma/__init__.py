"""Policies of how many draft nodes each request verifies in a step. One file per policy: it registers
itself, and all files here are loaded with the package."""

from importlib import import_module
from pkgutil import iter_modules

from engine.speculation.gamma.policy import registered_policies

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def gamma_policy_names() -> tuple[str, ...]:
    """The names that requests may ask for."""
    return tuple(kind.name for kind in registered_policies())
