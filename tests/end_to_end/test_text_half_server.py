"""The text half of a model that also takes images, served: what the card says, what it writes with and
without drafts, and what an image gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import torch

from engine.config import EngineConfig
from worlds.client_servers import WAIT_SECONDS
from worlds.engine_servers import engine_served
from worlds.scripted_engine import VOCAB_SIZE, byte_tokenizer
from worlds.tiny_models import greedy_text
from worlds.tiny_wholes import tiny_whole

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
NUM_WRITTEN = 12


def test_text_is_written_as_the_whole_writes_it_and_an_image_is_refused(tmp_path: Path) -> None:
    whole = tiny_whole("qwen2_5_vl", VOCAB_SIZE)
    whole.save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes: Any = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 16}
    config = EngineConfig(model=str(tmp_path), max_num_seqs=2, prefix_layers="1", **sizes)
    prompt = tokenizer.encode("a picture of", add_special_tokens=False)
    body = {"prompt": prompt, "max_tokens": NUM_WRITTEN, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    with (
        engine_served(config) as found,
        httpx.Client(base_url=f"{found.url}/v1", timeout=WAIT_SECONDS) as client,
    ):
        (card,) = client.get("/models").json()["data"]
        assert (card["modalities"], card["unserved"]) == (["text"], ["vision"])
        for drafter in ("none", "prefix_layers"):
            asked: dict[str, Any] = {**body, "speculative": {"draft_strategy": drafter}}
            reply = client.post("/completions", json=asked)
            assert reply.status_code == 200, reply.text
            written = reply.json()["choices"][0]["token_ids"]
            assert written == greedy_text(whole, prompt, NUM_WRITTEN)
        content = [{"type": "text", "text": "What is this?"}, IMAGE]
        chat = {"messages": [{"role": "user", "content": content}]}
        refused = client.post("/chat/completions", json=chat)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "messages.0.content.1")
        assert "this model's vision part is not served here" in error["message"]
