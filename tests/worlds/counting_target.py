"""A tiny model that counts in circles of eight, and its texts: what follows is certain, so that heads
learn it in seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, HIDDEN = 320, 32
NUM_USED = 160
"""Tokens that its texts use: the first of the vocabulary."""


def counting_model(seed: int = 0) -> LlamaForCausalLM:
    """Token t is followed by the next of its circle: the first eight dimensions say where on the
    circle, the others which circle."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            bos_token_id=0,
            eos_token_id=None,
        )
    )
    place = torch.nn.functional.one_hot(torch.arange(VOCAB) % 8, 8).float() * 3
    circle = torch.randn(VOCAB // 8, HIDDEN - 8).repeat_interleave(8, 0)
    embeddings = torch.cat([place, circle], dim=1)
    before = [token // 8 * 8 + (token - 1) % 8 for token in range(VOCAB)]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.copy_(embeddings[before])
    return model


def counted(first: int, length: int) -> list[int]:
    """Returns what the model writes behind a token, that token first."""
    return [first // 8 * 8 + (first + step) % 8 for step in range(length)]


def written_texts(path: Path, count: int, seed: int = 0) -> Path:
    """Writes texts as ``training.written`` does."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        ids = counted(rng.randrange(NUM_USED), rng.randint(12, 24))
        rows.append(
            {"kind": "chat", "temperature": 0.0, "num_prompt": rng.randint(1, 4), "ids": ids}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
