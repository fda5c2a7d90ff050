"""What an engine lends to its drafters: its target, its store and models made from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drafters.base import DrafterUnavailableError
from drafters.model.protocol import DraftModel, FeatureModel, PredictionHeads
from drafters.registry import PlainContext
from engine.config import EngineConfig
from engine.drafting.heads import DraftHeads
from engine.drafting.models import DraftModels
from engine.model.runner import ModelRunner


class EngineContext(PlainContext):
    """See ``drafters.base.DrafterContext``. Only while the engine is being built."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        vocab_size: int,
        draft_models: DraftModels | None = None,
        heads: DraftHeads | None = None,
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        super().__init__(vocab_size, config.drafter_settings)
        self.runner = runner
        self.config = config
        self._draft_models = draft_models
        self._heads = heads
        self._encode = encode

    def encode(self, text: str) -> Sequence[int]:
        """Raises DrafterUnavailableError where the target came without a tokenizer."""
        if self._encode is None:
            raise DrafterUnavailableError("needs the target's tokenizer, and there is none here")
        return self._encode(text)

    def draft_model(self, name: str) -> DraftModel:
        """Raises DrafterUnavailableError with the reason where there is none for this drafter."""
        if self._draft_models is None:
            raise DrafterUnavailableError("needs a draft model, and there is none here")
        return self._draft_models.get(name)

    def medusa_heads(self) -> PredictionHeads:
        """Raises DrafterUnavailableError with the reason where there are none."""
        if self._heads is None:
            raise DrafterUnavailableError("needs trained heads, and there are none here")
        return self._heads.medusa(self.runner)

    def eagle_head(self) -> FeatureModel:
        """Raises DrafterUnavailableError with the reason where there is none."""
        if self._heads is None:
            raise DrafterUnavailableError("needs a trained head, and there is none here")
        return self._heads.eagle(self.runner)
