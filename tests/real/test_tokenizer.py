"""SmolLM2's tokenizer and template, out of its GGUF file."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from engine.names import locate
from engine.tokenizer import load_tokenizer
from engine.weights.gguf.file import find_gguf, read_header
from engine.weights.gguf.tokenizer import end_token_ids, gguf_tokenizer
from worlds.real_model import REAL

pytestmark = REAL

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "1 + 1?"},
    ],
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer("smollm2")


def test_special_tokens_are_one_each(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n") == [1, 4093, 198, 26843, 2, 198]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert len(tokenizer) == 49152


def test_texts_end_with_a_turn_or_a_document() -> None:
    file = find_gguf(locate("smollm2"))
    assert file is not None
    assert end_token_ids(read_header(file)) == (0, 2)


def test_digits_are_cut_apart(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("goes_on", [True, False])
def test_without_tools_its_template_is_the_files(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], goes_on: bool
) -> None:
    file = find_gguf(locate("smollm2"))
    assert file is not None
    theirs = gguf_tokenizer(read_header(file))
    asked: dict[str, Any] = {"tokenize": False, "add_generation_prompt": goes_on}
    text = tokenizer.apply_chat_template(messages, **asked)
    assert text == theirs.apply_chat_template(messages, **asked)
    assert (SYSTEM in str(text)) == (messages[0]["role"] != "system")
