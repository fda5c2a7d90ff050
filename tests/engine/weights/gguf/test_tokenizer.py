"""The vocabularies of GGUF files as texts find them."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf.constants import TokenType
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.model.loader import load_tokenizer
from engine.weights.gguf.tokenizer import end_token_ids
from worlds.gguf_files import (
    TEMPLATE,
    TOKENS,
    gemma_vocabulary,
    header_of,
    tiny_llama,
    tokenizer_of,
    values_of,
    with_tokens,
    write_gguf,
)

CONTROL, USER_DEFINED = TokenType.CONTROL, TokenType.USER_DEFINED
LLAMA = values_of(tiny_llama())
TINY = tokenizer_of(LLAMA)


def test_templates_that_have_names_are_taken_as_well() -> None:
    of_tools = "{{ tools | length }} tools"
    name = "tokenizer.chat_template.tool_use"
    tokenizer = tokenizer_of(LLAMA | {"tokenizer.chat_templates": ["tool_use"], name: of_tools})
    assert tokenizer.chat_template == {"default": TEMPLATE, "tool_use": of_tools}
    chat = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(chat, tools=[{}], tokenize=False) == "1 tools"


@pytest.mark.parametrize(
    ("names", "eos", "ends"),
    [
        # gpt-oss' "<|end|>" ends its reasoning, before what it says.
        (["<|return|>", "<|end|>", "<|call|>"], 0, [0, 2]),
        (["<|end|>", "<|endoftext|>"], 0, [0, 1]),
        # Gemma 4's.
        (["<eos>", "<turn|>", "<|tool_call>", "<|tool_response>"], 0, [0, 1, 3]),
        # Those of Solar Open, whose reasoning ends as gpt-oss' does, of Kimi K2, and of older Gemmas.
        (["<|end|>", "<|flush|>", "<|calls|>"], 1, [1, 2]),
        (["[EOS]", "[EOT]", "<|im_end|>"], 2, [0, 1, 2]),
        (["<eos>", "<end_of_turn>"], 1, [0, 1]),
    ],
)
def test_texts_end_where_their_models_do(names: list[str], eos: int, ends: list[int]) -> None:
    first = len(TOKENS)
    kinds = {each: USER_DEFINED if "tool" in each else CONTROL for each in names}
    values = with_tokens(LLAMA, kinds) | {"tokenizer.ggml.eos_token_id": first + eos}
    named = end_token_ids(header_of(values))
    assert [each - first for each in named if each >= first] == ends


@pytest.mark.parametrize(
    ("splitter", "said", "begins"),
    [
        ("llama-bpe", None, True),
        ("tekken", None, True),
        ("llama-bpe", False, False),
        ("smollm", None, False),
        ("smollm", True, True),
    ],
)
def test_texts_begin_as_the_vocabulary_has_it_where_a_file_does_not_say(
    splitter: str, said: bool | None, begins: bool
) -> None:
    """Files of Llama 3 do not, and its texts do."""
    values = {"tokenizer.ggml.pre": splitter, "tokenizer.ggml.add_bos_token": said}
    token_ids = tokenizer_of(LLAMA | values).encode("hello")
    assert token_ids == [1] * begins + [TOKENS.index("hello")]


@given(st.text(max_size=40))
def test_texts_come_back_from_their_tokens(text: str) -> None:
    assert TINY.decode(TINY.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("splitter", ["gpt-2", "llama-bpe", "qwen2"])
def test_other_tokenizers_are_those_of_transformers(tmp_path: Path, splitter: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", values={"tokenizer.ggml.pre": splitter})
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = load_tokenizer(str(path))
    for text in ("hello 123 wörld!\n\n  x", "", "don't  <|start|>stop<|end|>", "\t12.5e3"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_token == theirs.eos_token
    assert ours.chat_template == theirs.chat_template


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_tokens_that_are_not_spelled_in_bytes_letters_stand_whole(kind: TokenType) -> None:
    """DeepSeek's, and runs of spaces as GPT-NeoX's vocabulary has them beside its own."""
    begin, user, spaces = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>", " " * 4
    first, hello = len(TOKENS), TOKENS.index("hello")
    more = {begin: CONTROL, user: kind, spaces: USER_DEFINED, "\u0120" * 4: TokenType.NORMAL}
    begins = {"tokenizer.ggml.bos_token_id": first, "tokenizer.ggml.add_bos_token": True}
    tokenizer = tokenizer_of(with_tokens(LLAMA, more) | begins)
    assert (tokenizer.bos_token_id, len(tokenizer)) == (first, first + 4)
    text = f"{user}hello{spaces}hello{user}"
    token_ids = tokenizer.encode(text)
    assert token_ids == [first, first + 1, hello, first + 2, hello, first + 1]
    assert tokenizer.decode(token_ids) == begin + text
    shown = text.replace(user, "") if kind == CONTROL else text
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == shown


@pytest.mark.parametrize("space", [" ", "\u2581"])
def test_runs_of_white_space_are_matched_longest_first_as_gemmas_sentencepiece_does(
    space: str,
) -> None:
    """The expected pieces are those of sentencepiece, trained with such user-defined symbols."""
    tokenizer = tokenizer_of(gemma_vocabulary(space))
    texts = {
        char * size: [char * 31] * (size // 31) + [char * (size % 31)]
        for char in "\n\t "
        for size in (2, 40, 64)
    }
    texts[f"a{' ' * 32}ab ab"] = ["a", " " * 31, " ab", " ab"]
    texts["\n\n   a<b>\t\t  b"] = ["\n\n", "   ", "a", "<b>", "\t\t", "  ", "b"]
    for text, pieces in texts.items():
        found = tokenizer.encode(text, add_special_tokens=False)
        tokens = tokenizer.convert_ids_to_tokens(found)
        assert [each.replace("\u2581", " ") for each in tokens] == [*filter(None, pieces)]
        assert tokenizer.decode(found) == text


@pytest.mark.parametrize(
    ("said", "pieces"),
    [
        # As sentencepiece and Llama 2's tokenizer.json do, and llama.cpp.
        (None, ["_ab _a", "__ a", "____ ab", "<eos> _ab <eos> __ a"]),
        # As transformers does by itself.
        (True, ["_ab _a", "_a", "___ ab", "<eos> ab <eos> _a"]),
        (False, ["ab _a", "_a", "___ ab", "<eos> ab <eos> _a"]),
    ],
)
def test_texts_begin_with_a_space_unless_the_file_says_that_they_do_not(
    said: bool | None, pieces: list[str]
) -> None:
    values = {"general.architecture": "ernie4_5", "tokenizer.ggml.add_space_prefix": said}
    tokenizer = tokenizer_of(gemma_vocabulary("\u2581") | values)
    texts = ["ab a", " a", "   ab", "<eos>ab<eos> a"]
    found = [" ".join(tokenizer.tokenize(text)).replace("\u2581", "_") for text in texts]
    assert found == pieces
    for text in texts[:3] if said is not True else texts[:1]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("architecture", ["phi3", "phimoe"])
def test_phi_3s_special_tokens_take_the_white_space_behind_them(architecture: str) -> None:
    """All but three, as in its tokenizer.json; and words behind them begin with a space."""
    names = begin, eot, user, end = "<s>", "<|endoftext|>", "<|user|>", "<|end|>"
    values = with_tokens(gemma_vocabulary("\u2581"), dict.fromkeys(names, CONTROL))
    values["general.architecture"] = architecture
    kinds = "tokenizer.ggml.token_type"
    values[kinds] = [1 if each == USER_DEFINED else each for each in values[kinds]]
    tokenizer = tokenizer_of(values)
    text = "<s><|user|>\nab a<|end|> \n<|endoftext|>\n"
    found = tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))
    assert found[:6] == [begin, user, "\u2581ab", "\u2581a", end, eot]
    assert len(found) > 6


def test_one_score_for_all_leaves_the_order_of_merges_to_the_tokens() -> None:
    """As conversions of a tokenizer.json alone have it; runs of spaces come last."""
    own = {"general.architecture": "llama", "tokenizer.ggml.add_space_prefix": False}
    more = dict.fromkeys(("c", "d", "cd", "abc"), TokenType.NORMAL)
    values = with_tokens(gemma_vocabulary("\u2581"), more) | own
    values["tokenizer.ggml.scores"] = [-1000.0] * len(values["tokenizer.ggml.scores"])
    tokenizer = tokenizer_of(values)
    assert tokenizer.tokenize("abcd") == ["ab", "cd"]
    assert tokenizer.tokenize("  a") == ["\u2581", "\u2581a"]


@pytest.mark.parametrize("said", [None, False, True])
def test_texts_of_gemma_4_begin_with_its_token_whatever_the_file_says(said: bool | None) -> None:
    values = {
        "general.architecture": "gemma4",
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.add_bos_token": said,
    }
    tokenizer = tokenizer_of(gemma_vocabulary("\u2581") | values)
    found = tokenizer.convert_ids_to_tokens(tokenizer.encode("ab a"))
    assert found == ["<bos>", "ab", "\u2581", "a"]
