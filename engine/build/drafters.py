"""The drafters of an engine, and what they are lent of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from drafters.base import NORMED, Drafter, DrafterContext, hidden_layers_of
from drafters.registry import build_drafters, find_plugins
from engine.build.target import Target
from engine.config import EngineConfig
from engine.drafting.drafts import SMALL_MODEL
from engine.model.runner import ModelRunner


def load_drafters(target: Target, runner: ModelRunner, max_model_len: int) -> dict[str, Drafter]:
    """Returns the drafters that the settings name, by name. Raises DrafterPluginError."""
    config = target.config
    methods = {key: draft.method for key, draft in target.found.items()}
    context = _context(target, runner, max_model_len)
    plugins = find_plugins(config.drafter_plugins)
    return build_drafters(config.drafters, context, plugins, methods)


def hidden_layers(drafters: dict[str, Drafter], config: EngineConfig) -> tuple[int, ...]:
    """Returns the layers whose hidden states are read, by drafters or for embeddings."""
    wanted = set(hidden_layers_of(drafters.values()))
    if config.embeddings != "none":
        wanted.add(NORMED)
    return tuple(sorted(wanted))


def _context(target: Target, runner: ModelRunner, max_model_len: int) -> DrafterContext:
    """Returns what the engine lends to drafters; no encoder where the target came without a tokenizer."""
    config, found = target.config, target.found

    def draft_model(name: str) -> Any:
        is_head = name in found and found[name].method != SMALL_MODEL
        if is_head:
            return target.heads.load(name, runner, max_model_len)
        return target.drafts.get(name)

    lent: dict[str, Callable[..., Any]] = {"draft_model": draft_model}
    if target.tokenizer is not None:
        lent["encode"] = partial(target.tokenizer.encode, add_special_tokens=False)
    own = config.drafter_settings
    if all(draft.is_bundled for draft in found.values()):
        # Heads that come with a model have not earned a place in auto yet: it carries the target's
        # states for them in every step (docs/benchmarks.md).
        own = {**own, "auto": {"head": "none"} | dict(own.get("auto", {}))}
    # A draft has the settings of its method.
    settings = {**own, **{key: own.get(draft.method, {}) for key, draft in found.items()}}
    return DrafterContext(target.vocab_size, settings, **lent)
