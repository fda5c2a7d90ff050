"""Embeddings of a server in processes of its own, beside texts: transformers' own states, pooled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ollama
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.names import bundled_path
from worlds.served_command import Server, serving

pytestmark = pytest.mark.slow

TEXTS = ["def main():\n    return 1\n", "for each in values:\n" * 30, "x"]
TOLERANCE = 1e-5
FLAGS = ("--dtype", "float32", "--quantization", "none", "--embeddings", "mean")


@torch.inference_mode()
def expected() -> list[list[float]]:
    folder = bundled_path("target")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        states = model(ids, output_hidden_states=True, use_cache=False).hidden_states[-1][0]
        found.append(torch.nn.functional.normalize(states.mean(dim=0), dim=0).tolist())
    return found


def written(server: Server) -> str:
    with server.client() as client:
        reply = client.chat.completions.create(
            model="slipstream-bundled",
            messages=[{"role": "user", "content": TEXTS[1]}],
            max_tokens=64,
            temperature=0,
        )
    return str(reply.choices[0].message.content)


def test_embeddings_beside_texts_are_those_of_transformers(tmp_path: Path) -> None:
    wanted = expected()
    with serving(tmp_path, *FLAGS) as server, ThreadPoolExecutor() as threads:
        alone = written(server)
        texts = [threads.submit(written, server) for _ in range(2)]
        with server.client() as client:
            reply = client.embeddings.create(model="slipstream-bundled", input=TEXTS)
        with ollama.Client(host=server.url) as other:
            again = other.embed("slipstream-bundled:latest", TEXTS).embeddings
        assert {each.result() for each in texts} == {alone}
    for vector, one, right in zip(reply.data, again, wanted, strict=True):
        assert max(abs(a - b) for a, b in zip(vector.embedding, right, strict=True)) < TOLERANCE
        assert max(abs(a - b) for a, b in zip(one, right, strict=True)) < TOLERANCE
