"""Adapters of an engine in a process of its own: every client knows of a change when it is answered."""

from __future__ import annotations

import asyncio
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from engine.lora.adapters import Adapters
from engine.process.child import EngineHost
from engine.process.client import RemoteEngine
from engine.request.errors import AdapterError, UnknownAdapterError
from worlds.lora_adapters import save_adapter
from worlds.scripted_engine import ScriptedEngine
from worlds.tiny_models import make_runner, tiny_model


class Runtime:
    """An engine's runtime, as far as adapters go."""

    def __init__(self) -> None:
        self.adapters = Adapters(make_runner(tiny_model("llama"), exact=True).serve_adapters(), "")


def client_of(host: EngineHost) -> RemoteEngine:
    ours, theirs = Pipe()
    host.attach(False, theirs.fileno())
    theirs._handle = None  # the host's from now on
    return RemoteEngine(ScriptedEngine().info, ours)


async def test_all_clients_know_when_a_change_is_answered(tmp_path: Path) -> None:
    save_adapter(tmp_path / "it", tiny_model("llama"), seed=1)
    host, runtime = EngineHost(), Runtime()
    built: Any = host._built
    built.set_result(runtime)
    one, other = client_of(host), client_of(host)
    told: list[Any] = []
    other.add_adapter_listener(told.append)
    await asyncio.gather(one.start(), other.start())
    found = await one.load_adapter("mine", str(tmp_path / "it"))
    assert one.info.adapters == other.info.adapters == (found,) == runtime.adapters.infos
    with pytest.raises(AdapterError, match="'mine' is loaded"):
        await other.load_adapter("mine", str(tmp_path / "it"))
    assert (await other.load_adapter("mine", str(tmp_path / "it"), may_replace=True)) == found
    with pytest.raises(AdapterError, match="no such folder"):
        await one.load_adapter("another", str(tmp_path / "absent"))
    # One that comes later is told what has changed since the engine was built.
    late = client_of(host)
    heard = asyncio.Event()
    late.add_adapter_listener(lambda _: heard.set())
    await late.start()
    await heard.wait()
    assert late.info.adapters == (found,)
    assert await late.unload_adapter("mine") == found
    assert one.info.adapters == other.info.adapters == late.info.adapters == ()
    with pytest.raises(UnknownAdapterError):
        await one.unload_adapter("mine")
    assert told == [(found,), (found,), ()]
    for each in (one, other, late):
        await each.stop()
