"""The models in huggingface's cache, by the names under which they are served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from engine.hub.choice import Choice, HubError, HubFile, choose, gguf_choices
from engine.hub.name import HubName
from slipstream.tools.models.memory import Needs, needs_of

_WEIGHTS = (".gguf", ".safetensors", ".bin")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """``size``: bytes on the disk. ``needs``: None where its files do not say it, as those of drafts and
    adapters."""

    name: str
    path: Path
    size: int
    needs: Needs | None


def cached_models() -> list[CachedModel]:
    """Returns the complete ones, by name, each in the newest version in the cache."""
    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    found: list[CachedModel] = []
    for repo in repos:
        if repo.repo_type == "model" and repo.revisions:
            newest = max(repo.revisions, key=lambda each: ("main" in each.refs, each.last_modified))
            files = [
                HubFile(
                    each.file_path.relative_to(newest.snapshot_path).as_posix(), each.size_on_disk
                )
                for each in newest.files
            ]
            found += _models(repo.repo_id, Path(newest.snapshot_path), files)
    return sorted(found, key=lambda each: each.name.lower())


def _models(repo: str, snapshot: Path, files: list[HubFile]) -> Iterator[CachedModel]:
    for choice in gguf_choices(files):
        yield _model(f"{repo}:{choice.label}", snapshot / choice.files[0].path, choice)
    plain = [each for each in files if not each.path.endswith(".gguf")]
    try:
        yield _model(repo, snapshot, choose(HubName(repo), plain))
    except HubError:
        return


def _model(name: str, path: Path, choice: Choice) -> CachedModel:
    weights = sum(each.size for each in choice.files if each.path.endswith(_WEIGHTS))
    return CachedModel(name, path, choice.num_bytes, needs_of(path, weights))
