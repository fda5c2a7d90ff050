"""How a model's operations with a state reach the engine.

transformers writes layers with a state against a few functions of their modeling files, which it
exchanges itself for those of other packages. Here their names lead to functions that ask the plan of
the step (``operators``), while one is running, and else to what they led to before. Which layer calls
says the layer itself, before it runs.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import CodeType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from engine.request.errors import UnsupportedModelError
from engine.states import operators  # noqa: F401  # they register themselves
from engine.states.operator import NEVER_CALLED, OPERATORS, Operator
from engine.states.plan import StatePlan, StateProbe
from kvpool.state_store import StateShape

# It says that functions are slow that the engine takes the place of.
logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)

_GATE_SHARE = 16
_FIRST = "first_state_op"
"""Attribute of a layer with a state: the number of its first operation."""


class _Running(threading.local):
    plan: StatePlan | None = None
    op = 0


_running = _Running()


@contextmanager
def answering(plan: StatePlan | None) -> Iterator[None]:
    """Within it, operations with a state ask ``plan``."""
    before, _running.plan = _running.plan, plan
    try:
        yield
    finally:
        _running.plan = before


_KERNELS = ("conv1d", "delta", "scan", "mamba_inner", "selective_state", "lightning", "linear_attn")
"""Parts of the names of functions that carry a state."""


class StateOperatorError(Exception):
    """An operator failed while a model's operations were counted."""

    def __init__(self, function: str, error: Exception) -> None:
        super().__init__(f"its operator for {function} fails: {error!r}")


def _served(function: Callable[..., Any], serve: Operator) -> Callable[..., Any]:
    @wraps(function)
    def asking(*args: Any, **kwargs: Any) -> Any:
        if _running.plan is None:
            return function(*args, **kwargs)
        op = _running.op
        _running.op += 1
        try:
            return serve(_running.plan, op, *args, **kwargs)
        except Exception as error:
            if isinstance(_running.plan, StateProbe):
                raise StateOperatorError(function.__name__, error) from error
            raise

    vars(asking)["serves_states"] = True
    return asking


# --- which layers have any ---


def attach_states(model: PreTrainedModel) -> None:
    """Leads the operations with a state of a model's layers here; once for a model. Raises
    UnsupportedModelError, naming layer and function, where there is one that is not known."""
    for name, module, called in _stateful(model):
        unknown = sorted(called - OPERATORS.keys() - NEVER_CALLED)
        if unknown:
            raise UnsupportedModelError(
                f"{type(model).__name__}: the layer {name} keeps a state by {', '.join(unknown)}, "
                "which is not served; docs/extend.md says how an operator for it is added"
            )
        modeling = vars(sys.modules[type(module).__module__])
        for function in called & OPERATORS.keys():
            if not hasattr(modeling[function], "serves_states"):
                modeling[function] = _served(modeling[function], OPERATORS[function])
        if called & OPERATORS.keys() and _FIRST not in vars(module):
            module.register_forward_pre_hook(_begin)


def gates_of(model: nn.Module) -> set[nn.Module]:
    """Returns linear layers that make a few numbers of a row, which say how a state decays: what they are
    off by adds up over a text, and they are a thousandth of the weights."""
    return {
        each
        for _, module, _ in _stateful(model)
        for each in module.children()
        if isinstance(each, nn.Linear) and each.out_features * _GATE_SHARE <= each.in_features
    }


def _begin(module: nn.Module, _args: Any) -> None:
    """Says which layer's operations follow; while they are counted, they say it themselves."""
    plan = _running.plan
    if isinstance(plan, StateProbe):
        vars(module)[_FIRST] = len(plan.shapes)
    _running.op = getattr(module, _FIRST, 0)


@contextmanager
def finding_states() -> Iterator[list[StateShape]]:
    """Within it a model runs once; then the list has the shapes of its operations with a state, by
    their numbers."""
    probe = StateProbe()
    with answering(probe):
        yield probe.shapes


def _stateful(model: nn.Module) -> Iterator[tuple[str, nn.Module, set[str]]]:
    """Yields the layers that keep a state: name, module, and the functions of its file that it calls."""
    called = {kind: _state_functions(kind) for kind in {type(each) for each in model.modules()}}
    for name, module in model.named_modules():
        if called[type(module)]:
            yield name, module, called[type(module)]


def _state_functions(kind: type) -> set[str]:
    """Returns the functions of a class's modeling file that carry a state and that its methods name."""
    modeling = vars(sys.modules[kind.__module__])
    if not kind.__module__.startswith("transformers.models.") and "transformers_modules" not in (
        kind.__module__
    ):
        return set()
    named = {
        name
        for method in vars(kind).values()
        if inspect.isfunction(method)
        for name in _names(inspect.unwrap(method).__code__)
    }
    return {
        name
        for name in named
        if callable(modeling.get(name))
        and (name in OPERATORS or any(part in name for part in _KERNELS))
    }


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))
