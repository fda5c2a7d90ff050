"""The formats of published folders, one file each: which one a folder is of, and its network.

A format is a module of this package with ``recognised`` and ``read``. The first takes the configuration
and the names of tensors and returns the method, which is the name of the drafter that drafts with it, or
None; the second returns the network, which is still to be placed and bound.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from transformers import PreTrainedModel

from engine.drafting import published
from engine.drafting.facts import TargetFacts
from engine.drafting.published.folder import DraftFolder, DraftRefusedError
from engine.drafting.published.mtp import find_module, read_mtp
from engine.drafting.published.mtp_gguf import read_gguf_mtp
from engine.request.errors import UnsupportedModelError
from engine.weights.gguf.file import find_gguf, read_header
from engine.weights.gguf.mtp import MtpLayer

MTP = "mtp"
_MODULES = (f"{published.__name__}.{each.name}" for each in iter_modules(published.__path__))
_FORMATS = [
    module
    for name in _MODULES
    if name != __name__ and hasattr(module := import_module(name), "recognised")
]


def method_of(folder: DraftFolder) -> str | None:
    """Returns the method of a folder; None: of none that is known here, so it is a model of its own."""
    return _format_of(folder)[1]


def read_network(method: str, path: Path, facts: TargetFacts, target: PreTrainedModel) -> Any:
    """Returns the network of a folder of this method, which is still to be placed and bound. Raises
    DraftRefusedError with the reason."""
    if method == MTP:
        gguf = find_gguf(str(path))
        return read_gguf_mtp(target, gguf, facts) if gguf else read_mtp(target, path, facts)
    folder = DraftFolder.open(path)
    module, found = _format_of(folder)
    if found != method:
        raise folder.refused(f"it is not of the method {method}")
    return module.read(folder, facts)


def brings_mtp(path: Path, num_layers: int) -> bool:
    """Returns whether a checkpoint, a folder or a GGUF file, has an MTP module of a kind that is known
    behind so many layers."""
    try:
        gguf = find_gguf(str(path))
        if gguf is not None:
            return MtpLayer(read_header(gguf), num_layers).count > 0
        find_module(DraftFolder.open(path), num_layers)
    except (DraftRefusedError, UnsupportedModelError):
        return False
    return True


def _format_of(folder: DraftFolder) -> tuple[Any, str | None]:
    names = folder.tensors.keys()
    found = ((each, each.recognised(folder.config, names)) for each in _FORMATS)
    return next((pair for pair in found if pair[1] is not None), (None, None))
