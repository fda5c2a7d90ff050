"""The figures that an inference gateway's picker reads off ``/metrics``, by its configuration, are there
and true."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from worlds.deploy_tools import DEPLOY
from worlds.scraping import STEP
from worlds.scripted_engine import ScriptedEngine
from worlds.serving import serve

PICKER = DEPLOY / "kubernetes" / "components" / "gateway" / "picker_config.yaml"


def engines() -> dict[str, dict[str, str]]:
    plugins = yaml.safe_load(PICKER.read_text())["plugins"]
    (extractor,) = (each for each in plugins if each["type"] == "core-metrics-extractor")
    ours = extractor["parameters"]["engineConfigs"]
    return {each["name"]: each for each in ours}


async def families(client: Any) -> dict[str, Any]:
    # The picker sends no Accept header of its own.
    answer = await client.get("http://test/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {each.name: each for each in text_string_to_metric_families(answer.text)}


def extracted(found: dict[str, Any], engine: dict[str, str]) -> dict[str, Any]:
    """Returns the picker's knowledge of an endpoint: each figure is a gauge's only sample."""
    seen: dict[str, Any] = {}
    for spec, name in engine.items():
        if spec.endswith("Spec"):
            assert found[name].type == "gauge"
            (sample,) = found[name].samples
            seen[spec] = sample.labels if spec == "cacheInfoSpec" else sample.value
    return seen


@pytest.mark.parametrize("name", engines())
async def test_the_picker_reads_load_and_sizes(name: str) -> None:
    engine = ScriptedEngine()
    picker = engines()[name]
    async with serve(engine) as client:
        before = extracted(await families(client), picker)
        engine.emit(STEP)
        after = extracted(await families(client), picker)
    loads = ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec")
    assert [before[each] for each in loads] == [0, 0, 0]
    assert [after[each] for each in loads] == [1, 4, 0.35]
    if "cacheInfoSpec" in picker:
        sizes = {"block_size": "16", "num_gpu_blocks": "100"}
        assert sizes.items() <= after["cacheInfoSpec"].items()
    else:
        assert (after["cacheBlockSizeSpec"], after["cacheNumBlocksSpec"]) == (16, 100)
