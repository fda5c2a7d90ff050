"""How a model's operations with a state reach the engine.

transformers writes layers with a state against a few functions of their modeling files, which it
exchanges itself for those of other packages. Here their names lead to functions that ask the plan of
the step, while one is running, and else to what they led to before. Which layer calls says the layer
itself, before it runs.
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

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from engine.request.errors import UnsupportedModelError
from engine.states.plan import Convolution, Recurrence, StatePlan, StateProbe
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


# --- the functions, as transformers calls them ---


def _convolution(
    plan: StatePlan,
    op: int,
    hidden_states: Tensor,  # [1, channels, num_rows]
    weight: Tensor,  # [channels, width]
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    silu = activation in ("silu", "swish")
    rows = hidden_states[0].transpose(0, 1)
    output = plan.convolve(op, Convolution(rows, weight, bias, silu)).transpose(0, 1)[None]
    return output if silu or activation is None else ACT2FN[activation](output)


def _delta_rule(
    plan: StatePlan,
    op: int,
    query: Tensor,  # [1, num_rows, key_heads, key_dim]
    key: Tensor,
    value: Tensor,  # [1, num_rows, heads, value_dim]
    g: Tensor,  # [1, num_rows, heads], or for each of a key's dimensions
    beta: Tensor,  # [1, num_rows, heads]
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    rows = query[0], key[0], value[0], g[0], beta[0]
    scale = query.shape[-1] ** -0.5
    output = plan.recur(op, Recurrence(*rows, use_qk_l2norm_in_kernel, scale))
    return output[None], None


def _selective_scan(
    plan: StatePlan,
    op: int,
    hidden_states: Tensor,  # [1, num_rows, heads, head_dim]
    dt: Tensor,  # [1, num_rows, heads]
    A: Tensor,  # noqa: N803  # [heads]
    B: Tensor,  # noqa: N803  # [1, num_rows, groups, state_size]
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803  # [heads]
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Tensor | tuple[Tensor, None]:
    rows, dt = hidden_states[0].float(), dt[0]
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = dt.clamp(*dt_limit).float()
    asked = Recurrence(C[0], B[0], rows * dt[..., None], A.float() * dt)
    output = plan.recur(op, asked)
    if D is not None:
        output = output + D[:, None] * rows
    return (output[None], None) if return_final_states else output[None]


_SERVED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _selective_scan,
}
_WITH_CACHE_ALONE = frozenset(
    {
        "causal_conv1d_update",
        "torch_recurrent_gated_delta_rule",
        "recurrent_kimi_delta_attention",
        "mamba2_selective_state_update",
        "mamba2_split_conv1d_scan_combined",
    }
)
"""Functions that layers call with a cache of transformers' own, or in training: never here."""
_KERNELS = ("conv1d", "delta", "scan", "mamba_inner", "selective_state", "lightning", "linear_attn")
"""Parts of the names of functions that carry a state."""


def _served(function: Callable[..., Any], serve: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def asking(*args: Any, **kwargs: Any) -> Any:
        if _running.plan is None:
            return function(*args, **kwargs)
        op = _running.op
        _running.op += 1
        return serve(_running.plan, op, *args, **kwargs)

    vars(asking)["serves_states"] = True
    return asking


# --- which layers have any ---


def attach_states(model: PreTrainedModel) -> None:
    """Leads the operations with a state of a model's layers here; once for a model. Raises
    UnsupportedModelError, naming layer and function, where there is one that is not known."""
    for name, module, called in _stateful(model):
        unknown = sorted(called - _SERVED.keys() - _WITH_CACHE_ALONE)
        if unknown:
            raise UnsupportedModelError(
                f"{type(model).__name__}: the layer {name} keeps a state by {', '.join(unknown)}, "
                "which is not served"
            )
        modeling = vars(sys.modules[type(module).__module__])
        for function in called & _SERVED.keys():
            if not hasattr(modeling[function], "serves_states"):
                modeling[function] = _served(modeling[function], _SERVED[function])
        if called & _SERVED.keys() and _FIRST not in vars(module):
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
        if callable(modeling.get(name)) and any(part in name for part in _KERNELS)
    }


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))
