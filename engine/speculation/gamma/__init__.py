"""Policies of how many draft nodes each request verifies in a step. One file per policy: it registers
itself, and all files here are loaded with the package."""

from importlib import import_module
from pkgutil import iter_modules

from engine.speculation.gamma.controller import GammaController
from engine.speculation.gamma.policy import DraftCandidate, Grant, registered_policies

__all__ = ["DraftCandidate", "GammaController", "Grant", "gamma_policy_names"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def gamma_policy_names() -> tuple[str, ...]:
    """The names that requests may ask for."""
    return tuple(info.name for info in registered_policies())
