"""The methods whose published folders are read: which one a folder is of, and its network."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from engine.drafting.facts import TargetFacts
from engine.drafting.published import dflash, eagle3, medusa, mtp
from engine.drafting.published.folder import DraftFolder

MTP = "mtp"


def method_of(folder: DraftFolder) -> str | None:
    """Returns the method of a folder, the name of the drafter that drafts with it; None: of none that is
    known here, so it is a model of its own."""
    config, names = folder.config, folder.tensors.keys()
    if eagle3.recognises(config, names):
        return "p_eagle" if _is_parallel(config, names) else "eagle3"
    if dflash.recognises(config, names):
        return "dspark" if _is_sequential(config, names) else "dflash"
    return "medusa" if medusa.recognises(config) else None


def read_network(method: str, path: Path, facts: TargetFacts, target: PreTrainedModel) -> Any:
    """Returns the network of a folder of this method, which is still to be placed and bound. Raises
    DraftRefusedError with the reason."""
    if method == MTP:
        return mtp.read_mtp(target, path)
    folder = DraftFolder.open(path)
    if method == "medusa":
        return medusa.read_medusa(folder, facts)
    return (eagle3 if method in ("eagle3", "p_eagle") else dflash).read(folder, facts)


def _is_parallel(config: Mapping[str, Any], names: Collection[str]) -> bool:
    return "mask_hidden" in names or config.get("speculators_model_type") == "peagle"


def _is_sequential(config: Mapping[str, Any], names: Collection[str]) -> bool:
    is_named = config.get("speculators_model_type") == "dspark"
    return is_named or any(name.startswith("markov_head.") for name in names)
