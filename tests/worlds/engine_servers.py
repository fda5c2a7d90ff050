"""A real engine behind a real uvicorn, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

from engine.build import build_engine
from engine.config import EngineConfig
from engine.process.threaded import AsyncEngine
from server.app import build_app
from server.settings import Settings
from worlds.client_servers import WAIT_SECONDS, listening, wait_for


@dataclass
class Served:
    engine: AsyncEngine
    url: str

    @property
    def pool(self) -> Any:
        return self.engine.core.pool

    def client(self) -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=WAIT_SECONDS
        )

    def until(self, has_work: bool) -> None:
        """Waits for requests to come to the engine, or to leave it: aborts take effect between steps."""
        wait_for(lambda: self.engine.core.has_work is has_work)


@contextmanager
def engine_served(config: EngineConfig, **settings: Any) -> Iterator[Served]:
    """The engine of a configuration on a loopback port, while the block runs."""
    engine, tokenizer = build_engine(config)
    with listening(build_app(engine, tokenizer, Settings(drain_seconds=1, **settings))) as url:
        yield Served(engine, url)
