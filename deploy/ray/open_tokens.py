"""How much an engine has to do."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from engine.request.events import TokenEvent
from engine.request.params import GenerationRequest


class OpenTokens:
    """``total``: what open requests, those that wait included, may still take."""

    def __init__(self) -> None:
        self.total = 0

    async def counted(
        self, request: GenerationRequest, events: AsyncGenerator[TokenEvent, None]
    ) -> AsyncGenerator[TokenEvent, None]:
        """The request's events, as they come."""
        left = len(request.prompt_token_ids) + request.sampling.max_tokens
        self.total += left
        try:
            async with aclosing(events):
                async for event in events:
                    # The first one says that the prompt is done, too.
                    still = min(left, request.sampling.max_tokens) - len(event.token_ids)
                    self.total -= left - still
                    left = still
                    yield event
        finally:
            self.total -= left
