"""Other people's clients, as they come, against a live server: nothing fails, and each shows acceptance.

They are no dependencies of ours, and want versions of their own: each test runs where its client is on
the path (or, LangChain, can be imported), and is skipped elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from engine.tokenizer import bundled_path
from worlds.deploy_tools import find_tool
from worlds.live_prometheus import LiveServer, live_prometheus, live_server

pytestmark = pytest.mark.slow

MODEL = "slipstream-bundled"
TOKENIZER = str(bundled_path("target"))
NUM_REQUESTS = 8
ALWAYS_DRAFTED = {
    "draft_strategy": "nasd",
    "adaptive_depth": "fixed",
    "num_speculative_tokens": 3,
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(speculative=ALWAYS_DRAFTED) as found:
        yield found


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        find_tool(name) is None, reason=f"no {name} on the path: a venv of its own has room for it"
    )


def run(folder: Path, *command: str, offline: bool = True) -> str:
    """Returns the client's output; it has to end with 0."""
    program = find_tool(command[0])
    assert program is not None
    hidden = {"PYTHONPATH", "HF_HUB_OFFLINE"}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    done = subprocess.run(
        [program, *command[1:]], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@needs("vllm")
@pytest.mark.parametrize(
    ("backend", "endpoint"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
def test_vllm_bench_serve(server: LiveServer, tmp_path: Path, backend: str, endpoint: str) -> None:
    shape = ["--random-input-len", "40", "--random-output-len", "16"]
    shape += ["--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "2", "--ignore-eos"]
    text = run(
        tmp_path,
        *("vllm", "bench", "serve", "--base-url", f"http://{server.address}", "--model", MODEL),
        *("--tokenizer", TOKENIZER, "--backend", backend, "--endpoint", endpoint),
        *("--dataset-name", "random", *shape),
        *("--save-result", "--result-filename", "result.json"),
    )
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["completed"] == NUM_REQUESTS
    assert found["total_output_tokens"] == 16 * NUM_REQUESTS
    assert found["spec_decode_num_drafts"] > 0
    assert 0 < found["spec_decode_acceptance_rate"] <= 100
    assert found["spec_decode_acceptance_length"] > 1
    assert "Acceptance rate" in text


@needs("guidellm")
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(server: LiveServer, tmp_path: Path, endpoint: str) -> None:
    backend = f"kind=openai_http,target=http://{server.address},model={MODEL}"
    run(
        tmp_path,
        *("guidellm", "run", "--backend", f"{backend},request_format={endpoint}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=16"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--output", "kind=json,path=result.json", "--disable-progress"),
    )
    (found,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    assert found["requests"]["errored"] == []
    replies = found["requests"]["successful"]
    assert replies
    for each in replies:
        assert each["output_metrics"]["text_tokens"] == 16
        account = each["response_metrics"]["speculative_decoding"]
        assert account["num_spec_steps"] == sum(account["acceptance_histogram"]) > 0


@needs("aiperf")
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_aiperf(server: LiveServer, tmp_path: Path, kind: str) -> None:
    # Offline it takes no folder for a tokenizer; with a folder it asks nobody.
    text = run(
        tmp_path,
        *("aiperf", "profile", "--model", MODEL, "--url", f"http://{server.address}"),
        *("--endpoint-type", kind, "--streaming", "--tokenizer", TOKENIZER),
        *("--isl", "40", "--osl", "16", "--use-server-token-count", "--ui", "simple"),
        *("--extra-inputs", "ignore_eos:true"),
        *("--request-count", str(NUM_REQUESTS), "--concurrency", "2"),
        *("--output-artifact-dir", "out", "--server-metrics-formats", "json"),
        offline=False,
    )
    assert "Draft Acceptance Rate" in text
    lines = (tmp_path / "out" / "profile_export.jsonl").read_text().splitlines()
    assert len(lines) == NUM_REQUESTS
    assert [json.loads(line)["error"] for line in lines if json.loads(line).get("error")] == []
    found = json.loads((tmp_path / "out" / "server_metrics_export.json").read_text())["metrics"]
    for name in ("generation_tokens", "kv_cache_usage_perc", "spec_decode_num_accepted_tokens"):
        assert f"vllm:{name}" in found


@needs("inference-perf")
def test_inference_perf(server: LiveServer, tmp_path: Path) -> None:
    """It asks Prometheus, not the server, for the server's figures."""
    with live_prometheus(tmp_path, server.address) as prometheus:
        prometheus.scrape_again()
        lengths = {"min": 16, "max": 40, "mean": 24, "std_dev": 4, "total_count": 32}
        texts = {"type": "random", "input_distribution": lengths, "output_distribution": lengths}
        stages = [{"num_requests": 2 * NUM_REQUESTS, "concurrency_level": 2}]
        served = {"type": "vllm", "model_name": MODEL, "base_url": f"http://{server.address}"}
        scraped = {"url": prometheus.url, "scrape_interval": 2}
        config: dict[str, Any] = {
            "api": {"type": "completion", "streaming": True},
            "data": texts,
            "load": {"type": "concurrent", "num_workers": 1, "stages": stages},
            "server": served | {"ignore_eos": True},
            "tokenizer": {"pretrained_model_name_or_path": TOKENIZER},
            "metrics": {"type": "prometheus", "prometheus": scraped},
            "storage": {"local_storage": {"path": "out"}},
        }
        (tmp_path / "perf.yml").write_text(yaml.safe_dump(config))
        run(tmp_path, "inference-perf", "-c", "perf.yml")
    client = json.loads((tmp_path / "out" / "summary_lifecycle_metrics.json").read_text())
    assert client["successes"]["count"] == 2 * NUM_REQUESTS
    assert client["failures"]["count"] == 0
    seen = json.loads((tmp_path / "out" / "summary_prometheus_metrics.json").read_text())
    successes = seen["successes"]
    assert successes["count"] > 0
    for name in ("time_to_first_token", "request_prefill_time", "request_decode_time"):
        assert successes[name]["mean"] > 0, name


class Point(BaseModel):
    """A point in a plane."""

    x: int
    y: int


@pytest.mark.skipif(find_spec("langchain_openai") is None, reason="no langchain-openai here")
@pytest.mark.filterwarnings("default")
def test_langchain(server: LiveServer) -> None:
    from langchain_openai import ChatOpenAI

    asked: dict[str, Any] = {"model": MODEL, "base_url": f"http://{server.address}/v1"}
    asked |= {"api_key": "unused", "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**asked, max_tokens=24, stream_usage=True)
    whole = chat.invoke("def add(a, b):")
    chunks = list(chat.stream("def add(a, b):"))
    assert len(chunks) > 2
    assert "".join(each.content for each in chunks) == whole.content
    counted = [each.usage_metadata for each in chunks if each.usage_metadata]
    assert counted == [whole.usage_metadata]
    account = whole.response_metadata["token_usage"]["speculative"]
    assert account["drafter"] == "nasd"
    assert account["num_drafts"] > 0
    # Sampled: greedily the small model writes one digit after the other until there is no more room.
    asked |= {"temperature": 1, "max_tokens": 300}
    structured = ChatOpenAI(**asked, seed=1).with_structured_output(Point, method="json_schema")
    assert isinstance(structured.invoke("A point"), Point)
    called = ChatOpenAI(**asked, seed=2).bind_tools([Point], tool_choice="required")
    calls = called.invoke("A point").tool_calls
    assert calls
    assert all(call["name"] == "Point" and Point(**call["args"]) for call in calls)
