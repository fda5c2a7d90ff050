"""A model whose engine is a process that comes and goes."""

from __future__ import annotations

import asyncio
import glob
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from engine.drafting.drafts import parse_drafts
from engine.hub.name import parse_name
from engine.logs import LogOptions
from engine.lora.names import parse_adapters
from engine.names import locate
from engine.process.client import RemoteEngine
from engine.process.launch import EngineProcess, with_adapters
from engine.process.memory import own_bytes
from engine.request.info import AdapterInfo
from server.models.services import Services
from server.request.speculative import SpeculativeResolver

Serve = Callable[[RemoteEngine, SpeculativeResolver | None], Services]
"""Makes what answers in front of an engine; of speculation, as it was when the model was ended."""
_WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt", ".pth"}
# Beside its weights: Python, torch and what is compiled.
_PROCESS_BYTES = 512 << 20
_SLACK = 1.15


class EngineLauncher:
    """Launches one engine at a time; what ``/admin`` has changed outlasts it. One that hangs for longer
    than ``step_timeout`` seconds is killed."""

    def __init__(
        self,
        config: EngineConfig,
        serve: Serve,
        *,
        build: str = "engine.build:build_engine",
        logs: LogOptions | None = None,
        environment: Mapping[str, str] | None = None,
        step_timeout: float,
    ) -> None:
        self._config = config
        self._serve = serve
        self._build = build
        self._logs = logs
        self._environment = environment
        self._step_timeout = step_timeout
        # One waits while it loads; the other ends it then.
        self._threads = ThreadPoolExecutor(2, "launcher")
        self._process: EngineProcess | None = None
        self._services: Services | None = None
        self._resolver: SpeculativeResolver | None = None
        self._adapters: Sequence[AdapterInfo] | None = None
        # What it came to when it was loaded, and with all keys and values.
        self._loaded_bytes = self._full_bytes = 0

    @property
    def adapters(self) -> Sequence[str]:
        """Returns the names of adapters that the model has once it is loaded."""
        if self._adapters is None:
            return tuple(parse_adapters(self._config.lora))
        return tuple(each.name for each in self._adapters)

    @property
    def file_bytes(self) -> int:
        """Returns those of the model's weights, as far as they are here."""
        return _weights_bytes(self._config.served_model)

    @property
    def needed_bytes(self) -> int:
        """Returns what of the host's memory it takes at least; 0: it is not known, or lies elsewhere."""
        if self._config.device != "cpu":
            return 0
        drafts = (_weights_bytes(each.path) for each in parse_drafts(self._config.draft))
        files = self.file_bytes + sum(drafts)
        usual = files + _PROCESS_BYTES if files else 0
        return int(_SLACK * (self._loaded_bytes or usual))

    @property
    def promised_bytes(self) -> int:
        """Returns what it will take yet of the memory that is free now."""
        pid = None if self._process is None else self._process.pid
        if pid is None or self._config.device != "cpu":
            return 0
        return max(0, (self._full_bytes or self.needed_bytes) - own_bytes(pid))

    async def launch(self, promised_bytes: int) -> Services:
        """Load it, where others will take ``promised_bytes`` yet. Raises EngineError, OSError,
        ValueError; nothing is left of it then, nor where this is cancelled."""
        config = replace(self._config, promised_bytes=promised_bytes)
        if self._adapters is not None:
            config = with_adapters(config, self._adapters)
        process = self._process = EngineProcess(
            config, build=self._build, logs=self._logs, environment=self._environment
        )
        loop = asyncio.get_running_loop()
        try:
            process.begin()
            info = await loop.run_in_executor(self._threads, process.ready)
            engine = RemoteEngine(info, process.connect(), process.pulse)
            engine.add_adapter_listener(self._keep_adapters)
            self._services = await loop.run_in_executor(
                self._threads, self._serve, engine, self._resolver
            )
            await engine.start()
        except BaseException:
            await self.stop()
            raise
        process.watch(None, self._step_timeout, ends_hung=True)
        if process.pid is not None:
            self._loaded_bytes = own_bytes(process.pid)
            self._full_bytes = self._loaded_bytes + info.kv_bytes
        return self._services

    async def stop(self) -> None:
        """End its process, also while it loads; harmless where there is none."""
        process, services = self._process, self._services
        self._process = self._services = None
        self._full_bytes = 0
        if services is not None:
            self._resolver = services.resolver
            await services.engine.stop()
            services.bodies.close()
        if process is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._threads, process.stop)

    def end_process(self) -> None:
        """Stops the rest of it where there is no event loop any more."""
        if self._process is not None:
            self._process.stop()

    def _keep_adapters(self, adapters: Sequence[AdapterInfo]) -> None:
        self._adapters = adapters


def _weights_bytes(model: str) -> int:
    """Returns those of a folder's weights, or of a file and its further parts; 0: they are not here."""
    if parse_name(model) is not None:  # on the hub, and not fetched
        return 0
    path = Path(locate(model)).expanduser()
    parts = re.sub(r"-\d{5}-of-", "-?????-of-", glob.escape(path.name))
    files = path.iterdir() if path.is_dir() else path.parent.glob(parts)
    found: Counter[str] = Counter()
    for each in files:
        if each.suffix in _WEIGHTS and each.is_file():
            found[each.suffix] += each.stat().st_size
    # Of a folder that has them in several formats one is read.
    return max(found.values(), default=0)
