"""How much an engine has to do."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from engine.events import TokenEvent
from engine.params import GenerationRequest
from engine.process.client import RemoteEngine


class CountingEngine(RemoteEngine):
    """``open_tokens``: what its open requests, those that wait included, may still take."""

    open_tokens = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        left = len(request.prompt_token_ids) + request.sampling.max_tokens
        self.open_tokens += left
        try:
            async with aclosing(super().generate(request)) as events:
                async for event in events:
                    # The first one says that the prompt is done, too.
                    still = min(left, request.sampling.max_tokens) - len(event.token_ids)
                    self.open_tokens -= left - still
                    left = still
                    yield event
        finally:
            self.open_tokens -= left
