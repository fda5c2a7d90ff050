"""A CPU that passes for a device: nothing that lies there is the host's to look at, and every look is
counted."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import engine.kernels
from engine.capture.captures import Captures, Replays
from engine.core import EngineCore
from engine.drafting.block_model import BlockHead
from engine.drafting.head_model import ChainHead
from engine.kernels.triton.choice_ops import choose_rows
from engine.model import runner
from engine.model.runner import ModelRunner
from engine.sampling import sampler
from engine.transfer import Arrival, Readback, upload
from worlds.engine_harness import Driver

_LOOKING_METHODS = frozenset(
    getattr(Tensor, name)
    for name in ("item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__")
    + ("__float__", "__index__", "__contains__")
)
"""Methods that read a CPU's memory without an operation of their own, or would copy a device's."""
_LOOKING_OPERATIONS = frozenset(
    {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
    | {"aten::is_nonzero", "aten::unique_dim", "aten::_unique2", "aten::unique_consecutive"}
    | {"aten::bincount", "aten::repeat_interleave.Tensor", "aten::nonzero_static"}
)
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_"})
"""Given masks, they ask where these are true."""
_CREATING = frozenset({torch.tensor, torch.as_tensor, torch.from_numpy, Tensor.new_tensor})
"""A copy from memory that is not pinned waits as well."""

_FORWARDS = (
    (ModelRunner, "forward"),
    (ChainHead, "_plan"),
    (ChainHead, "_run"),
    (BlockHead, "_run_blocks"),
)


@contextmanager
def no_host() -> Iterator[None]:
    """No kernels of the host's: sampling goes the way that it goes on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.kernels, "HOSTS", frozenset())
        yield


class Looks:
    """Counts what the host does while it is watched. ``num_waits``: readbacks that had something to
    fetch. ``looks``: by name, whatever else would have made the host wait."""

    def __init__(self) -> None:
        self.num_waits = 0
        self.looks: Counter[str] = Counter()
        self._is_transfer = self._is_forward = False

    def note(self, function: Any, name: str) -> None:
        # A forward's inputs are its attention backend's business.
        if not self._is_transfer and not (self._is_forward and function in _CREATING):
            self.looks[name] += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Yields on a device, without a host's kernels or recordings of forwards."""
        fetch = Readback.fetch

        def counted(readback: Readback) -> None:
            self.num_waits += bool(readback._added)
            fetch(readback)

        with no_host(), pytest.MonkeyPatch.context() as patch:
            for module in [each for each in sys.modules.values() if hasattr(each, "upload")]:
                if module.upload is upload:
                    patch.setattr(module, "upload", self._flagged("_is_transfer", upload))
            for module in (runner, sampler):  # programs are interpreted here, as numpy
                chosen = self._flagged("_is_transfer", choose_rows)
                patch.setattr(module, "choose_rows", chosen)
            patch.setattr(Arrival, "tolist", self._flagged("_is_transfer", Arrival.tolist))
            patch.setattr(Readback, "fetch", counted)
            for name in ("pad", "forward"):  # forwards run as they are
                patch.setattr(Captures, name, getattr(Replays, name))
            for owner, name in _FORWARDS:
                patch.setattr(owner, name, self._flagged("_is_forward", getattr(owner, name)))
            with _Methods(self), _Operations(self):
                yield

    def _flagged(self, flag: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def flagged(*arguments: Any, **named: Any) -> Any:
            before = getattr(self, flag)
            setattr(self, flag, True)
            try:
                return function(*arguments, **named)
            finally:
                setattr(self, flag, before)

        return flagged


class WatchedDriver(Driver):
    """Keeps how often each step waited."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self.looks = Looks()
        self.waits: list[int] = []

    def step(self) -> None:
        before = self.looks.num_waits
        with self.looks.watching():
            super().step()
        self.waits.append(self.looks.num_waits - before)


class _Methods(TorchFunctionMode):
    def __init__(self, looks: Looks) -> None:
        super().__init__()
        self._looks = looks

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if function in _LOOKING_METHODS or function in _CREATING:
            self._looks.note(function, function.__name__)
        return function(*arguments, **(named or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, looks: Looks) -> None:
        super().__init__()
        self._looks = looks

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        name = function._schema.name
        if name in _LOOKING_OPERATIONS or (name in _INDEXING and _has_mask(arguments[1])):
            self._looks.note(function, name)
        return function(*arguments, **(named or {}))


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)
