"""A tiny random Llama with a small tokenizer, saved as a model folder."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench.workloads import CODE_FILE, DATA
from training.tokenizer import train_tokenizer


@lru_cache(maxsize=1)
def _tokenizer_json() -> PreTrainedTokenizerFast:
    lines = (DATA / CODE_FILE).read_text(encoding="utf-8").splitlines()
    return train_tokenizer([json.loads(line)["prompt"] for line in lines], vocab_size=512)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Trained on the held-out prefixes themselves: enough to encode them."""
    tokenizer = _tokenizer_json()
    fresh = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
    )
    fresh.chat_template = tokenizer.chat_template
    return fresh


def save_tiny_model(folder: Path) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
