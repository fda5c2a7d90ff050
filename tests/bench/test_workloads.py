"""The prompts come from the held-out files, fit, and are the same every time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.workloads import (
    AGENTS_FILE,
    CHAT_FILE,
    CODE_FILE,
    DATA,
    DOCUMENTS_FILE,
    EDITS_FILE,
    PromptSource,
    load_prompts,
    workload_names,
)
from engine.model.loader import bundled_path, load_tokenizer
from slipstream.client.spec_bench import Questions
from worlds.tiny_bench_model import tiny_tokenizer


def tiny_source(max_prompt_tokens: int = 4000, chat_template: bool = True) -> PromptSource:
    source = PromptSource(tiny_tokenizer(), vocab_size=512, max_prompt_tokens=max_prompt_tokens)
    if not chat_template:
        source.tokenizer.chat_template = None
    return source


@pytest.fixture(scope="module")
def source() -> PromptSource:
    return tiny_source()


def text_of(source: PromptSource, ids: tuple[int, ...], skip_special: bool = False) -> str:
    return str(source.tokenizer.decode(list(ids), skip_special_tokens=skip_special))


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def test_code_prompts_are_the_held_out_prefixes_and_come_round_again(source: PromptSource) -> None:
    wanted = [line["prompt"] for line in lines_of(CODE_FILE)]
    prompts = load_prompts("code", source, len(wanted) + 2)
    texts = [text_of(source, prompt.token_ids, skip_special=True) for prompt in prompts[:3]]
    assert texts == wanted[:3]
    assert prompts[len(wanted) :] == [prompt._replace(lap=1) for prompt in prompts[:2]]
    assert {prompt.lap for prompt in prompts[: len(wanted)]} == {0}


def test_edit_prompts_go_through_the_chat_template_where_there_is_one(source: PromptSource) -> None:
    asked = lines_of(EDITS_FILE)[0]["messages"][0]["content"]
    text = text_of(source, load_prompts("edit", source, 1)[0].token_ids)
    assert asked in text
    assert text.endswith("<|assistant|>")
    assert text.count("<|bos|>") == 1
    bare = tiny_source(chat_template=False)
    text = text_of(bare, load_prompts("edit", bare, 1)[0].token_ids, skip_special=True)
    assert text.strip() == asked.strip()
    for workload in ("chat", "repeat", "summary", "agent"):
        with pytest.raises(ValueError, match=f"{workload} needs a tokenizer with a chat template"):
            load_prompts(workload, bare, 1)


def test_random_prompts_have_no_special_tokens_and_stay_in_the_vocabulary(
    source: PromptSource,
) -> None:
    prompts = load_prompts("random", source, 4)
    special = set(source.tokenizer.all_special_ids)
    assert special
    tokens = [token for prompt in prompts for token in prompt.token_ids]
    assert all(0 <= token < 512 and token not in special for token in tokens)
    assert len(set(prompts)) == 4


@pytest.mark.parametrize("workload", workload_names())
def test_prompts_are_the_same_every_time(workload: str, source: PromptSource) -> None:
    assert load_prompts(workload, source, 5) == load_prompts(workload, source, 5)


def test_prompts_too_long_for_the_model_are_left_out(source: PromptSource) -> None:
    room = sorted(len(prompt.token_ids) for prompt in load_prompts("edit", source, 64))[20]
    prompts = load_prompts("edit", tiny_source(room), 64)
    assert len(prompts) == 64
    assert max(len(prompt.token_ids) for prompt in prompts) <= room
    with pytest.raises(ValueError, match="no prompt of workload code fits into 1 tokens"):
        load_prompts("code", tiny_source(1), 1)


def test_what_is_not_there_is_an_error(tmp_path: Path, source: PromptSource) -> None:
    known = ", ".join(workload_names())
    with pytest.raises(ValueError, match=f"unknown workload 'poems'; known: {known}"):
        load_prompts("poems", source, 1)
    with pytest.raises(FileNotFoundError):
        load_prompts("code", PromptSource(source.tokenizer, 512, 4000, tmp_path), 1)


def test_samples_are_eight_of_each_prompt(source: PromptSource) -> None:
    prompts = load_prompts("samples", source, 16)
    assert prompts == [prompts[0]] * 8 + [prompts[8]] * 8
    assert prompts[8] != prompts[0]


def test_a_chat_ends_where_the_next_reply_begins(source: PromptSource) -> None:
    lines = lines_of(CHAT_FILE)
    prompts = load_prompts("chat", source, len(lines))
    texts = [text_of(source, prompt.token_ids) for prompt in prompts]
    assert len(set(texts)) == len(lines) >= 32
    for text, line in zip(texts, lines, strict=True):
        assert text.endswith("<|assistant|>")
        assert all(message["content"] in text for message in line["messages"])
    assert {len(line["messages"]) for line in lines} == {1, 3, 4}


def test_every_document_is_asked_about_before_one_is_asked_about_twice(
    source: PromptSource,
) -> None:
    documents = [line["text"] for line in lines_of(DOCUMENTS_FILE)]
    prompts = load_prompts("summary", source, 3 * len(documents))
    texts = [text_of(source, prompt.token_ids) for prompt in prompts]
    assert len(set(texts)) == len(prompts)
    assert {prompt.lap for prompt in prompts} == {0}
    for text, document in zip(texts, 3 * documents, strict=True):
        assert document in text
        assert text.rpartition(document)[2].strip()


def test_an_agent_is_asked_before_each_turn_and_sessions_go_on_one_turn_at_a_time(
    source: PromptSource,
) -> None:
    sessions = lines_of(AGENTS_FILE)
    roles = [[message["role"] for message in session["messages"]] for session in sessions]
    turns = [each.count("assistant") for each in roles]
    prompts = [prompt.token_ids for prompt in load_prompts("agent", source, sum(turns))]
    assert len(set(prompts)) == sum(turns)
    assert min(turns) >= 4
    # Eight sessions begin at different turns; the next eight prompts are those of the turns after.
    for at in range(len(sessions)):
        first, then = prompts[at], prompts[at + len(sessions)]
        assert then[: len(first)] == first or len(then) < len(first)
    assert all(
        session["tools"][0]["function"]["name"] in text_of(source, ids)
        for session, ids in zip(sessions, prompts, strict=False)
    )


def test_a_repeat_is_an_edit_with_its_answer_and_both_can_be_predicted(
    source: PromptSource,
) -> None:
    tokenizer = load_tokenizer(str(bundled_path("target")))
    bundled = PromptSource(tokenizer, len(tokenizer), 1900)
    edit, repeat = load_prompts("edit", bundled, 1)[0], load_prompts("repeat", bundled, 1)[0]
    assert repeat.token_ids[: len(edit.token_ids)] == edit.token_ids
    assert len(repeat.token_ids) > 1.5 * len(edit.token_ids)
    assert tokenizer.decode(repeat.token_ids).rstrip().endswith("<|assistant|>")
    before, answer = tokenizer.decode(edit.expected), tokenizer.decode(repeat.expected)
    assert len(edit.expected) > 50
    assert before in tokenizer.decode(edit.token_ids)
    assert answer in tokenizer.decode(repeat.token_ids)
    assert answer != before
    assert {prompt.expected for prompt in load_prompts("code", source, 3)} == {()}


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """Two questions of two turns in each of two categories of MT-bench, and three of one turn."""
    found = [(81, "writing"), (82, "writing"), (91, "math"), (92, "math")]
    lines = [
        {"question_id": at, "category": name, "turns": [f"first {at}", f"second {at}"]}
        for at, name in found
    ]
    lines += [
        {"question_id": at, "category": "qa", "turns": [f"only {at}"]} for at in (201, 202, 203)
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def test_each_category_of_a_file_is_a_workload_and_those_of_mt_bench_are_one_besides(
    asked: Path, source: PromptSource
) -> None:
    questions = Questions(asked)
    assert workload_names(questions) == (*workload_names(), "writing", "math", "qa", "mt_bench")
    full = replace(source, questions=questions)
    texts = [text_of(full, each.token_ids) for each in load_prompts("mt_bench", full, 1)]
    assert [text.partition("first ")[2][:2] for text in texts] == ["81", "82", "91", "92"]
    for ids, wanted in (("odd", {"201", "203"}), ("even", {"202"})):
        some = replace(source, questions=Questions(asked, ids))
        found = [text_of(some, each.token_ids) for each in load_prompts("qa", some, 1)]
        assert {text.partition("only ")[2][:3] for text in found} == wanted
    few = replace(source, questions=Questions(asked, per_category=1))
    assert len(load_prompts("mt_bench", few, 1)) == 2
    # A last batch is filled up by what comes round again.
    assert [each.lap for each in load_prompts("qa", full, 2, 2)] == [0, 0, 0, 1]


def test_what_follows_an_answer_makes_the_second_turn_of_a_chat(
    asked: Path, source: PromptSource
) -> None:
    full = replace(source, questions=Questions(asked), num_new_tokens=50)
    prompt = load_prompts("writing", full, 1)[0]
    chat = [
        {"role": "user", "content": "first 81"},
        {"role": "assistant", "content": "Once."},
        {"role": "user", "content": "second 81"},
    ]
    text = source.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    parts = [text_of(source, ids) for ids in (prompt.token_ids, prompt.follow_up)]
    assert parts[0] + "Once." + parts[1] == text
    assert not load_prompts("qa", full, 1)[0].follow_up
    room = len(prompt.token_ids) + 50 + len(prompt.follow_up)
    assert prompt.fits(replace(full, max_prompt_tokens=room))
    assert not prompt.fits(replace(full, max_prompt_tokens=room - 1))
