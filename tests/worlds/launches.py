"""Launches of a forward, counted on a CPU: each of torch's operations that computes, and each of Triton's
programs, those within an operator of ours too. Views and new memory are no launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_FREE = {
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "view"),
    *(
        "_unsafe_view",
        "unsqueeze",
        "squeeze",
        "transpose",
        "t",
        "slice",
        "select",
        "expand",
        "alias",
    ),
    *("narrow", "split", "split_with_sizes", "permute", "as_strided", "unbind", "lift_fresh"),
    *("resolve_conj", "resolve_neg", "view_as"),
}


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("slipstream::"):
            with self:
                return func.redispatch(_OWN, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        is_whole = name == "aten::reshape" or name == "aten::contiguous"
        if not is_whole and name.removeprefix("aten::") not in _FREE:
            self.names.append(name)
        return result


_OWN = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@contextmanager
def counting_launches() -> Iterator[list[str]]:
    """Names of what is launched meanwhile."""
    from triton.runtime.interpreter import GridExecutor

    plain, counted = GridExecutor.__call__, _Counted()

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        counted.names.append(self.fn.__name__)
        with _disable_current_modes():
            plain(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, counted:
        patch.setattr(GridExecutor, "__call__", launch)
        yield counted.names
