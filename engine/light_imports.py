"""Loads the engine's code without the parts of other libraries that it never runs.

transformers' modules load torch's compiler, symbolic algebra and distributed tensors, torchao and scipy
for what they decorate or might quantise: more than half of the time and of the memory that imports
take. Nothing here compiles with torch, so decorators for its compiler leave functions as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from engine.config import EngineConfig
from engine.names import locate

_COMPILER = "torch._dynamo"


@contextmanager
def light_imports(config: EngineConfig) -> Iterator[None]:
    """Within it, imports find no scipy, no torchao where this model does without it, and a compiler that
    leaves functions alone; transformers keeps to it that there are no distributed tensors. Does nothing
    where torch's compiler is loaded already, or where several ranks share the model."""
    if _COMPILER in sys.modules or config.tensor_parallel_size > 1:
        yield
        return
    hidden = ["scipy"] if _needs_torchao(config) else ["scipy", "torchao"]
    import_utils = import_module("transformers.utils.import_utils")
    utils, distributed = import_module("transformers.utils"), import_module("torch.distributed")
    asked = [f"is_{name}_available" for name in hidden]
    replaced = [(module, name) for module in (import_utils, utils) for name in asked]
    patches = [
        patch.object(module, name, _never)
        for module, name in [*replaced, (distributed, "is_available")]
    ]
    for each in patches:
        each.start()
    absent = _AbsentCompiler(_COMPILER)
    # Parts of it that are used without a compiler load by themselves.
    spec = find_spec(_COMPILER)
    absent.__path__ = [] if spec is None else list(spec.submodule_search_locations or ())
    sys.modules[_COMPILER] = absent
    try:
        yield
    finally:
        del absent.__path__
        for each in patches:
            each.stop()


def _needs_torchao(config: EngineConfig) -> bool:
    """Whether torchao quantizes this model, or may: what a hub holds is not known yet."""
    if config.quantized not in (None, "int8"):
        return True
    path = Path(locate(config.served_model))
    if not path.is_dir():
        return not path.is_file()
    try:
        found = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return bool(found["quantization_config"]["quant_method"] == "torchao")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _never() -> bool:
    return False


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
