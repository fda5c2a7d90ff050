"""Loads the engine's code without the parts of other libraries that it never runs.

transformers' modules load torch's compiler, symbolic algebra and distributed tensors, torchao and scipy
for what they decorate or might quantise: more than half of the time and of the memory that imports
take. Nothing here compiles with torch, so decorators for its compiler leave functions as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from engine.config import EngineConfig
from engine.names import locate

_COMPILER = "torch._dynamo"


@contextmanager
def light_imports(config: EngineConfig) -> Iterator[None]:
    """Within it, imports find no scipy, no flex attention (torch 2.14's loads symbolic algebra), no
    torchao where this model does without it, and a compiler that leaves functions alone; transformers
    keeps to it that there are no distributed tensors. Does nothing where torch's compiler is loaded
    already, or where several ranks share the model."""
    if _COMPILER in sys.modules or config.tensor_parallel_size > 1:
        yield
        return
    hidden = ["is_scipy_available", "is_torch_flex_attn_available"]
    hidden += ["is_torchao_available"] * (not _needs_torchao(config))
    absent = sys.modules[_COMPILER] = _AbsentCompiler(_COMPILER)
    # Parts of it that are used without a compiler load by themselves.
    absent.__path__ = [str(Path(import_module("torch").__file__ or "").parent / "_dynamo")]
    with ExitStack() as patches:
        for module in ("transformers.utils.import_utils", "transformers.utils"):
            for name in hidden:
                patches.enter_context(patch(f"{module}.{name}", return_value=False))
        patches.enter_context(patch("torch.distributed.is_available", return_value=False))
        yield
    del absent.__path__


@contextmanager
def without_torch() -> Iterator[None]:
    """Within it transformers finds no torch, which tokenizers do without: four fifths of what they load
    otherwise. For processes that run no model, since what is imported here keeps to it."""
    with ExitStack() as patches:
        for module in ("utils.import_utils", "utils", "utils.generic"):
            target = f"transformers.{module}.is_torch_available"
            patches.enter_context(patch(target, return_value=False))
        yield


def _needs_torchao(config: EngineConfig) -> bool:
    """Whether torchao quantizes this model."""
    path, text = Path(locate(config.served_model, config.revision)), ""
    with suppress(OSError):
        text = (path / "config.json").read_text(encoding="utf-8", errors="replace")
    return config.quantized not in (None, "int8") or "torchao" in text


class _AbsentCompiler(ModuleType):
    """Stands for ``torch._dynamo``, which torch's own functions load to be left alone by it. Whatever
    else is asked of it loads the real one, which takes its place."""

    def disable(self, function: Any = None, *arguments: Any, **more: Any) -> Any:
        del arguments, more
        return self.disable if function is None else function

    assume_constant_result = allow_in_graph = disable

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(_COMPILER) is self:
            for each in [each for each in sys.modules if f"{each}.".startswith(f"{_COMPILER}.")]:
                del sys.modules[each]
        return getattr(import_module(_COMPILER), name)
