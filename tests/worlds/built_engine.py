"""An engine's runner and drafters with models, under cores of any size up to the engine's own."""

from __future__ import annotations

from contextlib import suppress

from drafters.base import Drafter, DrafterUnavailableError
from drafters.registry import build_drafters
from engine.core import EngineCore
from engine.process.threaded import AsyncEngine
from worlds.engine_harness import Setup, build_core


class BuiltEngine:
    """``setup``: sizes that the engine has room for, by its own where they are not said."""

    def __init__(self, engine: AsyncEngine, **sizes: int) -> None:
        self._built = engine.core
        self.info = engine.info
        self.setup = Setup(
            num_blocks=engine.info.num_blocks,
            block_size=engine.info.block_size,
            max_model_len=engine.info.max_model_len,
        ).but(**sizes)

    def core(self, setup: Setup) -> EngineCore:
        limits = self._built.limits
        known = setup.but(
            eos_token_ids=limits.eos_token_ids,
            constrain=limits.constrain,
            drafters=self._drafters(),
        )
        return build_core(self._built.runner, limits.vocab_size, known)

    def _drafters(self) -> dict[str, Drafter]:
        """Those that learn from texts are new and know none; those with models find what their stores
        hold by its text."""
        drafters = dict(self._built.speculation.drafters)
        for name in drafters:
            with suppress(DrafterUnavailableError):
                drafters |= build_drafters([name])
        return drafters
