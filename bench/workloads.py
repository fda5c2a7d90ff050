"""Prompts to measure on: code to continue, edits to write out and to repeat, conversations, documents to
summarise, agents' turns, samples, noise, and code to continue after equally many tokens; and questions of
a file in Spec-Bench's form, each of its categories a workload.

Code and edits come from files that the bundled model never trained on (``bench/data``, written by
``training.bench_data``); conversations, documents and agents' sessions were written for it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from slipstream.client.spec_bench import Questions

DATA = Path(__file__).resolve().parent / "data"
CODE_FILE = "heldout_code.jsonl"
EDITS_FILE = "heldout_edits.jsonl"
CHAT_FILE = "chat.jsonl"
DOCUMENTS_FILE = "documents.jsonl"
AGENTS_FILE = "agents.jsonl"
RANDOM_PROMPT_TOKENS = 192
FILE_PROMPT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class PromptSource:
    """The source of prompts, and their longest length in tokens. ``num_new_tokens``: of an answer, which
    a second turn's prompt holds."""

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    max_prompt_tokens: int
    data: Path = DATA
    questions: Questions | None = None
    num_new_tokens: int = 0


class Prompt(NamedTuple):
    """Token ids; ``expected`` is what a client could send as the request's ``prediction``; ``lap``: how
    often it has come before; ``follow_up``: what comes between the answer and the answer to the second
    turn, empty without one."""

    token_ids: tuple[int, ...]
    expected: tuple[int, ...] = ()
    lap: int = 0
    follow_up: tuple[int, ...] = ()

    def fits(self, source: PromptSource) -> bool:
        further = len(self.follow_up) and source.num_new_tokens + len(self.follow_up)
        return 0 < len(self.token_ids) <= source.max_prompt_tokens - further


def load_prompts(
    workload: str, source: PromptSource, count: int, batch_size: int = 1
) -> list[Prompt]:
    """``count`` prompts, or all of a file's questions, and as many more as fill the last batch; the same
    ones every time.

    Where the data has fewer that fit, they come round again. Raises ValueError for an unknown
    workload or where none fits, FileNotFoundError where the held-out files are missing.
    """
    known = workload_names(source.questions)
    if workload not in known:
        raise ValueError(f"unknown workload {workload!r}; known: {', '.join(known)}")
    asked = workload not in _LOADERS
    prompts = _asked(workload, source) if asked else _LOADERS[workload](source, count)
    fitting = [prompt for prompt in prompts if prompt.fits(source)]
    if not fitting:
        raise ValueError(
            f"no prompt of workload {workload} fits into {source.max_prompt_tokens} tokens"
        )
    count = max(count, len(fitting)) if asked else count
    count = -(-count // batch_size) * batch_size
    laps = ((index // len(fitting), fitting[index % len(fitting)]) for index in range(count))
    return [prompt._replace(lap=lap) for lap, prompt in laps]


def workload_names(questions: Questions | None = None) -> tuple[str, ...]:
    return (*_LOADERS, *(() if questions is None else questions.names()))


def _code(source: PromptSource, count: int) -> list[Prompt]:  # noqa: ARG001
    lines = _read(source.data / CODE_FILE)
    return [Prompt(tuple(source.tokenizer(line["prompt"])["input_ids"])) for line in lines]


def _edit(source: PromptSource, count: int) -> list[Prompt]:  # noqa: ARG001
    tokenizer = source.tokenizer
    prompts = []
    for line in _read(source.data / EDITS_FILE):
        if tokenizer.chat_template is None:
            ids = tuple(tokenizer(line["messages"][-1]["content"] + "\n\n")["input_ids"])
        else:
            ids = _as_chat(tokenizer, line["messages"], "edit")
        before = line["messages"][-1]["content"].partition("\n\n")[2]
        prompts.append(Prompt(ids, _plain(tokenizer, before)))
    return prompts


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


_FOLLOW_UP = "Repeat the code."
_NUM_SAMPLES = 8


def _chat(source: PromptSource, count: int) -> list[Prompt]:  # noqa: ARG001
    """Questions and tasks of all kinds, some of them the second turn of a conversation."""
    return [
        Prompt(_as_chat(source.tokenizer, line["messages"], "chat"))
        for line in _read(source.data / CHAT_FILE)
    ]


def _summary(source: PromptSource, count: int) -> list[Prompt]:  # noqa: ARG001
    """Each document with the first instruction, then each with the next: all are asked about once before
    one is asked about twice."""
    documents = _read(source.data / DOCUMENTS_FILE)
    prompts = []
    for asked in range(len(_INSTRUCTIONS)):
        for at, line in enumerate(documents):
            instruction = _INSTRUCTIONS[(asked + at) % len(_INSTRUCTIONS)]
            message = {"role": "user", "content": f"{line['text']}\n\n{instruction}"}
            prompts.append(Prompt(_as_chat(source.tokenizer, [message], "summary")))
    return prompts


_INSTRUCTIONS = (
    "Summarise the text above in three sentences.",
    "List the most important points of the text above, with the names and figures it gives.",
    "Write one paragraph for a newsletter that tells what the text above is about.",
)


def _agent(source: PromptSource, count: int) -> list[Prompt]:  # noqa: ARG001
    """Returns an agent's prompts before each of its turns: the conversation up to there, which grows
    by calls and results. Sessions run beside each other, each at another turn, and go on one turn at
    a time; so a later prompt contains an earlier one and what was answered."""
    sessions = _read(source.data / AGENTS_FILE)
    turns = [
        [at for at, message in enumerate(session["messages"]) if message["role"] == "assistant"]
        for session in sessions
    ]
    prompts = []
    for step in range(max(map(len, turns))):
        for at, (session, places) in enumerate(zip(sessions, turns, strict=True)):
            if step < len(places):
                before = session["messages"][: places[(at + step) % len(places)]]
                ids = _as_chat(source.tokenizer, before, "agent", session["tools"])
                prompts.append(Prompt(ids))
    return prompts


def _as_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    workload: str,
    tools: list[dict[str, Any]] | None = None,
) -> tuple[int, ...]:
    """Up to where the next reply begins. Raises ValueError without a template."""
    # The template writes the start of the text itself.
    return _plain(tokenizer, _chat_text(tokenizer, messages, workload, tools))


def _chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    workload: str,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    if tokenizer.chat_template is None:
        raise ValueError(f"workload {workload} needs a tokenizer with a chat template")
    text = tokenizer.apply_chat_template(
        list(messages), tools=tools, tokenize=False, add_generation_prompt=True
    )
    return str(text)


_ANSWER = "<answer>"


def _asked(workload: str, source: PromptSource) -> list[Prompt]:
    """The first turn as a chat; of questions with a second one also what follows the answer to it."""
    assert source.questions is not None
    prompts = []
    for line in source.questions.of(workload):
        first = [{"role": "user", "content": line["turns"][0]}]
        prompt = Prompt(_as_chat(source.tokenizer, first, workload))
        if len(line["turns"]) > 1:
            answer = {"role": "assistant", "content": _ANSWER}
            second = {"role": "user", "content": line["turns"][1]}
            text = _chat_text(source.tokenizer, [*first, answer, second], workload)
            follow_up = _plain(source.tokenizer, text.rpartition(_ANSWER)[2])
            prompt = prompt._replace(follow_up=follow_up)
        prompts.append(prompt)
    return prompts


def _repeat(source: PromptSource, count: int) -> list[Prompt]:  # noqa: ARG001
    """The second turn of a conversation about one of the edits."""
    tokenizer = source.tokenizer
    prompts = []
    for line in _read(source.data / EDITS_FILE):
        messages = [
            *line["messages"],
            {"role": "assistant", "content": line["completion"]},
            {"role": "user", "content": _FOLLOW_UP},
        ]
        answer = _plain(tokenizer, line["completion"])
        prompts.append(Prompt(_as_chat(tokenizer, messages, "repeat"), answer))
    return prompts


def _samples(source: PromptSource, count: int) -> list[Prompt]:
    """Eight samples of each prompt of ``code``, as a request with ``n = 8`` asks for."""
    return [prompt for prompt in _code(source, count) for _ in range(_NUM_SAMPLES)]


def _files(source: PromptSource, count: int) -> list[Prompt]:  # noqa: ARG001
    """The first ``FILE_PROMPT_TOKENS`` of each file that has as many."""
    prompts = []
    for line in _read(source.data / CODE_FILE):
        ids = source.tokenizer(line["prompt"] + line["completion"])["input_ids"]
        if len(ids) >= FILE_PROMPT_TOKENS:
            prompts.append(Prompt(tuple(ids[:FILE_PROMPT_TOKENS])))
    return prompts


def _random(source: PromptSource, count: int) -> list[Prompt]:
    rng = random.Random(2026)
    special = set(source.tokenizer.all_special_ids)
    usable = [token_id for token_id in range(source.vocab_size) if token_id not in special]
    length = min(RANDOM_PROMPT_TOKENS, source.max_prompt_tokens)
    return [Prompt(tuple(rng.choices(usable, k=length))) for _ in range(count)]


def _read(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


_LOADERS: dict[str, Callable[[PromptSource, int], Sequence[Prompt]]] = {
    "code": _code,
    "edit": _edit,
    "repeat": _repeat,
    "chat": _chat,
    "summary": _summary,
    "agent": _agent,
    "samples": _samples,
    "random": _random,
    "files": _files,
}
