"""The prompts come from the held-out files, fit, and are the same every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.workloads import (
    CHAT_FILE,
    CODE_FILE,
    DATA,
    EDITS_FILE,
    PromptSource,
    load_prompts,
    workload_names,
)
from engine.model.loader import bundled_path, load_tokenizer
from worlds.tiny_bench_model import tiny_tokenizer


@pytest.fixture(scope="module")
def source() -> PromptSource:
    return PromptSource(tiny_tokenizer(), vocab_size=512, max_prompt_tokens=4000)


def text_of(source: PromptSource, ids: tuple[int, ...], skip_special: bool = False) -> str:
    text = source.tokenizer.decode(list(ids), skip_special_tokens=skip_special)
    assert isinstance(text, str)
    return text


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def test_code_prompts_are_the_held_out_prefixes(source: PromptSource) -> None:
    prompts = load_prompts("code", source, 3)
    wanted = [line["prompt"] for line in lines_of(CODE_FILE)[:3]]
    assert [text_of(source, ids, skip_special=True) for ids, _ in prompts] == wanted


def test_edit_prompts_go_through_the_chat_template(source: PromptSource) -> None:
    text = text_of(source, load_prompts("edit", source, 1)[0].token_ids)
    request = lines_of(EDITS_FILE)[0]["messages"][0]["content"]
    assert request in text
    assert text.endswith("<|assistant|>")
    assert text.count("<|bos|>") == 1


def test_edit_prompts_without_a_template_are_the_plain_request() -> None:
    bare = PromptSource(tiny_tokenizer(), vocab_size=512, max_prompt_tokens=4000)
    bare.tokenizer.chat_template = None
    text = text_of(bare, load_prompts("edit", bare, 1)[0].token_ids, skip_special=True)
    assert text.strip() == lines_of(EDITS_FILE)[0]["messages"][0]["content"].strip()


def test_random_prompts_have_no_special_tokens_and_stay_in_the_vocabulary(
    source: PromptSource,
) -> None:
    prompts = load_prompts("random", source, 4)
    special = set(source.tokenizer.all_special_ids)
    assert special
    assert all(0 <= token < 512 and token not in special for ids, _ in prompts for token in ids)
    assert len(set(prompts)) == 4


@pytest.mark.parametrize("workload", workload_names())
def test_prompts_are_the_same_every_time(workload: str, source: PromptSource) -> None:
    assert load_prompts(workload, source, 5) == load_prompts(workload, source, 5)


def test_prompts_too_long_for_the_model_are_left_out(source: PromptSource) -> None:
    lengths = sorted(len(ids) for ids, _ in load_prompts("edit", source, 64))
    room = lengths[20]
    short = PromptSource(source.tokenizer, 512, room)
    prompts = load_prompts("edit", short, 64)
    assert len(prompts) == 64
    assert max(len(ids) for ids, _ in prompts) <= room


def test_more_prompts_than_lines_come_round_again(source: PromptSource) -> None:
    count = len(lines_of(CODE_FILE))
    prompts = load_prompts("code", source, count + 2)
    assert prompts[count:] == prompts[:2]


def test_no_room_for_any_prompt_is_an_error(source: PromptSource) -> None:
    with pytest.raises(ValueError, match="no prompt of workload code fits into 1 tokens"):
        load_prompts("code", PromptSource(source.tokenizer, 512, 1), 1)


def test_an_unknown_workload_is_an_error(source: PromptSource) -> None:
    with pytest.raises(
        ValueError,
        match="unknown workload 'poems'; known: code, edit, repeat, chat, samples, random",
    ):
        load_prompts("poems", source, 1)


def test_missing_held_out_files_are_an_error(tmp_path: Path, source: PromptSource) -> None:
    with pytest.raises(FileNotFoundError):
        load_prompts("code", PromptSource(source.tokenizer, 512, 4000, tmp_path), 1)


def test_samples_are_eight_of_each_prompt(source: PromptSource) -> None:
    prompts = load_prompts("samples", source, 16)
    assert prompts[:8] == [prompts[0]] * 8
    assert prompts[8:] == [prompts[8]] * 8
    assert prompts[8] != prompts[0]


def test_a_repeat_is_an_edit_with_its_answer_and_a_second_request() -> None:
    tokenizer = load_tokenizer(str(bundled_path("target")))
    source = PromptSource(tokenizer, len(tokenizer), 1900)
    edit, repeat = load_prompts("edit", source, 1)[0], load_prompts("repeat", source, 1)[0]
    assert repeat.token_ids[: len(edit.token_ids)] == edit.token_ids
    assert len(repeat.token_ids) > 1.5 * len(edit.token_ids)
    assert tokenizer.decode(repeat.token_ids).rstrip().endswith("<|assistant|>")


def test_a_chat_ends_where_the_next_reply_begins(source: PromptSource) -> None:
    lines = lines_of(CHAT_FILE)
    texts = [text_of(source, ids) for ids, _ in load_prompts("chat", source, len(lines))]
    assert len(set(texts)) == len(lines) >= 32
    for text, line in zip(texts, lines, strict=True):
        assert text.endswith("<|assistant|>")
        assert all(message["content"] in text for message in line["messages"])
    assert {len(line["messages"]) for line in lines} == {1, 3, 4}


@pytest.mark.parametrize("workload", ["chat", "repeat"])
def test_conversations_need_a_template(workload: str) -> None:
    bare = PromptSource(tiny_tokenizer(), vocab_size=512, max_prompt_tokens=4000)
    bare.tokenizer.chat_template = None
    with pytest.raises(ValueError, match=f"workload {workload} needs a tokenizer with a chat temp"):
        load_prompts(workload, bare, 1)


def test_clients_could_predict_an_edit_by_its_file_and_a_repeat_by_the_answer() -> None:
    tokenizer = load_tokenizer(str(bundled_path("target")))
    source = PromptSource(tokenizer, len(tokenizer), 1900)
    edit, repeat = load_prompts("edit", source, 1)[0], load_prompts("repeat", source, 1)[0]
    before, answer = tokenizer.decode(edit.expected), tokenizer.decode(repeat.expected)
    assert len(edit.expected) > 50
    assert before in tokenizer.decode(edit.token_ids)
    assert answer in tokenizer.decode(repeat.token_ids)
    assert answer != before
    assert {prompt.expected for prompt in load_prompts("code", source, 3)} == {()}
