"""The adapters that an engine has, by name. They come and go while requests run: a request keeps the one
that it was admitted with."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.lora.folder import read_adapter
from engine.lora.names import check_name
from engine.model.adapted import AdaptedLayers, Adapter
from engine.request.errors import AdapterError, UnknownAdapterError
from engine.request.info import AdapterInfo
from engine.request.params import GenerationRequest
from engine.request.salts import Salt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    info: AdapterInfo
    rows: Adapter
    """The value that its requests' rows carry."""


class Adapters:
    """``layers``: of the model that adapters may change. ``base``: the folder or id of the model, which
    folders name as what they were made for. Any thread may call."""

    def __init__(self, layers: AdaptedLayers, base: str) -> None:
        self._layers, self._base = layers, base
        self._lock = threading.Lock()
        self._loaded: dict[str, LoadedAdapter] = {}

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """The loaded adapters, in the order in which they were loaded."""
        with self._lock:
            return tuple(each.info for each in self._loaded.values())

    def load(self, name: str, path: str, may_replace: bool = False) -> AdapterInfo:
        """Reads an adapter, which requests have from then on. ``may_replace``: in the place of one of
        that name. Raises AdapterError; then nothing has changed."""
        check_name(name)
        with self._lock:
            self._check_free(name, may_replace)
        weights = read_adapter(Path(path), self._layers.shapes)
        packed = self._layers.pack(weights.parts)
        parameters = sum(first.numel() + second.numel() for first, second in weights.parts.values())
        info = AdapterInfo(
            name=name,
            path=path,
            digest=weights.digest,
            rank=weights.rank,
            num_layers=len(weights.parts),
            num_parameters=parameters,
            num_bytes=packed.num_bytes,
            base_model=weights.base or None,
        )
        with self._lock:
            self._check_free(name, may_replace)
            self._loaded[name] = LoadedAdapter(info, packed)
        self._note(info)
        return info

    def unload(self, name: str) -> AdapterInfo:
        """Unloads an adapter: new requests do not find it, running ones keep it. Raises
        UnknownAdapterError."""
        with self._lock:
            found = self._loaded.pop(name, None)
        if found is None:
            raise UnknownAdapterError(name)
        logger.info("adapter %s was unloaded", name)
        return found.info

    def applied_to(self, request: GenerationRequest) -> tuple[GenerationRequest, Adapter | None]:
        """Returns the request under the salt of its adapter, and what its rows have. Raises
        UnknownAdapterError."""
        if request.adapter is None:
            return replace(request, cache_salt=Salt(request.cache_salt).joined()), None
        with self._lock:
            found = self._loaded.get(request.adapter)
        if found is None:
            raise UnknownAdapterError(request.adapter)
        salt = Salt(request.cache_salt, request.adapter, found.info.digest)
        return replace(request, cache_salt=salt.joined()), found.rows

    def _check_free(self, name: str, may_replace: bool) -> None:
        """Under the lock."""
        if name in self._loaded and not may_replace:
            fault = f"an adapter of the name {name!r} is loaded; unload it first, or replace it"
            raise AdapterError(fault)

    def _note(self, info: AdapterInfo) -> None:
        logger.info(
            "adapter %s: rank %d in %d layers, %.1f MB",
            info.name, info.rank, info.num_layers, info.num_bytes / 1e6,
        )  # fmt: skip
        made_for = (info.base_model or "").rstrip("/").rpartition("/")[2].lower()
        mine = self._base.rstrip("/").rpartition("/")[2].lower()
        if made_for and made_for != mine:
            logger.warning("adapter %s was made for %s", info.name, info.base_model)


def load_all(adapters: Adapters, wanted: Mapping[str, str]) -> None:
    """Raises AdapterError."""
    for name, path in wanted.items():
        try:
            adapters.load(name, path)
        except AdapterError as error:
            raise AdapterError(f"lora: adapter {name}: {error}") from None
