"""An inference gateway's scraper accepts what a server shows, and reads in it what is so."""

from __future__ import annotations

import httpx
import pytest
import yaml

from worlds.deploy_tools import DEPLOY
from worlds.metrics_scraper import VLLM, extracted, families
from worlds.scraping import STEP
from worlds.scripted_engine import ScriptedEngine
from worlds.serving import serve

pytestmark = pytest.mark.anyio

PICKER = DEPLOY / "kubernetes" / "components" / "gateway" / "picker_config.yaml"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def engines() -> dict[str, dict[str, str]]:
    plugins = yaml.safe_load(PICKER.read_text())["plugins"]
    (extractor,) = (each for each in plugins if each["type"] == "core-metrics-extractor")
    ours = extractor["parameters"]["engineConfigs"]
    return {each["name"]: each for each in ours} | {"vllm": VLLM}


async def metrics_of(client: httpx.AsyncClient) -> str:
    # The picker sends no Accept header of its own.
    answer = await client.get("http://test/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return answer.text


@pytest.mark.parametrize("name", engines())
async def test_the_picker_reads_load_and_sizes(name: str) -> None:
    engine = ScriptedEngine()
    async with serve(engine) as client:
        before = extracted(await metrics_of(client), engines()[name])
        engine.emit(STEP)
        after = extracted(await metrics_of(client), engines()[name])
    sizes = {"block_size": 16, "num_blocks": 100}
    assert before == {"waiting": 0, "running": 0, "kv_usage": 0} | sizes
    assert after == {"waiting": 1, "running": 4, "kv_usage": 0.35} | sizes


async def test_every_line_is_of_the_text_format() -> None:
    engine = ScriptedEngine()
    async with serve(engine) as client:
        await client.post("/completions", json={"prompt": "a", "max_tokens": 2})
        engine.emit(STEP)
        found = families(await metrics_of(client))
    assert found["slipstream_steps_total"].kind == "counter"
    assert found["slipstream_e2e_seconds"].kind == "histogram"
    assert {family.kind for family in found.values()} == {"counter", "gauge", "histogram"}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("# TYPE a gauge\n# TYPE a gauge\n", "a second TYPE for a"),
        ("# HELP a b\n# HELP a b\n", "a second HELP for a"),
        ("a 1\n# TYPE a gauge\n", "its type comes too late"),
        ("# TYPE a info\n", "info"),
        ('a{b="c} 1\n', "a"),
        ("a-b 1\n", "a-b"),
        ("a 1", "does not end"),
    ],
)
def test_the_scraper_refuses_what_is_none(text: str, fault: str) -> None:
    with pytest.raises(AssertionError, match=fault):
        families(text)
