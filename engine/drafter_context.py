"""What an engine lends to its drafters: its target, its store and models made from them."""

from __future__ import annotations

from drafters.registry import PlainContext
from engine.config import EngineConfig
from engine.model_runner import ModelRunner


class EngineContext(PlainContext):
    """See ``drafters.registry.DrafterContext``. Only while the engine is being built."""

    def __init__(self, runner: ModelRunner, config: EngineConfig, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.runner = runner
        self.config = config
        self.stand_template = config.stand_template
