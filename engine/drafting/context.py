"""The engine as its drafters see it while it is built: its tokenizer, and models made from its target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from drafters.registry import PlainContext
from engine.config import EngineConfig
from engine.drafting.heads import DraftHeads
from engine.drafting.models import DraftModels
from engine.model.runner import ModelRunner


class EngineContext(PlainContext):
    """A ``drafters.base.DrafterContext``."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        vocab_size: int,
        draft_models: DraftModels,
        heads: DraftHeads,
        encode: Callable[[str], Sequence[int]] | None,
    ) -> None:
        """``encode``: None where the target came without a tokenizer."""
        super().__init__(vocab_size, config.drafter_settings)
        self.draft_model = draft_models.get
        self.medusa_heads = partial(heads.medusa, runner)
        self.eagle_head = partial(heads.eagle, runner)
        if encode is not None:
            self.encode = encode
