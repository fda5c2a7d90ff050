from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, processors

from server.plan import IGNORED_HEADER
from worlds.official_clients import openai_client
from worlds.scripted_engine import BOS, EOS, ScriptedEngine, byte_tokenizer, engine_info
from worlds.serving import events, fault, post, serve

TEXT = "hello wörld, 100 € spent"
GROUPINGS = [(1,), (1, 3, 2), (7,), (1000,)]


async def test_the_openai_client_completes_and_streams() -> None:
    engine = ScriptedEngine(TEXT)
    asked: dict[str, Any] = {"model": "test/scripted", "prompt": "ab", "max_tokens": 99}
    async with openai_client(engine) as client:
        reply = await client.completions.create(**asked)
        options = {"include_usage": True}
        stream = await client.completions.create(**asked, stream=True, stream_options=options)
        *chunks, last = [chunk async for chunk in stream]
    assert reply.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert reply.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    for usage in (reply.usage, last.usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (2, len(TEXT.encode()))
        assert usage.total_tokens == 2 + len(TEXT.encode())
    assert last.choices == []
    assert all(chunk.usage is None for chunk in chunks)
    assert engine.open == set()


@pytest.mark.parametrize("group_sizes", GROUPINGS)
@pytest.mark.parametrize("stop", [None, "rld", "€ s", ["zz", "0 €", "0"], "t"])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_adds_up_to_the_whole_reply(
    group_sizes: Sequence[int], stop: Any, n: int
) -> None:
    """Text, tokens, logprobs, ends and usage; whatever the grouping of tokens into steps."""
    body = {
        "prompt": ["ab", "cde"],
        "max_tokens": 99,
        "n": n,
        "stop": stop,
        "logprobs": 1,
        "seed": 5,
        "return_token_ids": True,
        "speculative": {"return_drafted": True},
    }
    async with serve(ScriptedEngine(TEXT, group_sizes=group_sizes)) as client:
        whole = (await client.post("/completions", json=body)).json()
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage, done = events((await client.post("/completions", json=body)).text)
    assert done == "[DONE]"
    assert usage["usage"] == whole["usage"]
    assert len(whole["choices"]) == 2 * n
    for index, choice in enumerate(whole["choices"]):
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [each for part in parts for each in part["token_ids"]] == choice["token_ids"]
        assert [each for part in parts for each in part["tokens"]] == choice["tokens"]
        for key in ("num_steps", "num_draft_tokens"):
            assert sum(part[key] for part in parts) == choice[key] > 0
        for key, column in choice["logprobs"].items():
            assert [each for part in parts for each in part["logprobs"][key]] == column
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "stop"
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        assert all(part["finish_reason"] is None for part in parts[:-1])


@pytest.mark.parametrize("group_sizes", GROUPINGS)
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_cuts_text_tokens_and_bill(
    group_sizes: Sequence[int], include: bool
) -> None:
    """Every byte is a token here, so that every longer stop string crosses token borders."""
    engine = ScriptedEngine(TEXT, group_sizes=group_sizes)
    body = {"prompt": "ab", "max_tokens": 99, "logprobs": 0, "include_stop_str_in_output": include}
    async with serve(engine) as client:
        for stop in ("h", "lo w", "ör", "€", " spent", "t", "no such"):
            reply = (await client.post("/completions", json=body | {"stop": [stop]})).json()
            at, choice = TEXT.find(stop), reply["choices"][0]
            expected = TEXT if at < 0 else TEXT[: at + len(stop) * include]
            assert choice["text"] == expected
            assert choice["stop_reason"] == (None if at < 0 else stop)
            assert choice["finish_reason"] == "stop"
            assert reply["usage"]["completion_tokens"] == len(expected.encode())
            assert len(choice["logprobs"]["tokens"]) == len(expected.encode())
    assert engine.open == set()
    assert engine.closed_early == []


async def test_a_stop_string_ends_the_request_in_the_engine() -> None:
    endless = ScriptedEngine(script=lambda _: [*b"abc"] * 1000, group_sizes=(1,))
    await post("/completions", {"prompt": "x", "max_tokens": 400, "stop": "cab"}, endless)
    assert endless.aborted == {endless.requests[0].request_id}
    assert endless.num_events < 10


async def test_min_tokens_lets_early_stop_strings_pass() -> None:
    body = {"prompt": "x", "max_tokens": 99, "stop": "ab", "min_tokens": 5}
    reply = await post("/completions", body, ScriptedEngine("ab ab ab ab"))
    assert reply.json()["choices"][0]["text"] == "ab ab "


async def test_logprobs_have_openai_shape() -> None:
    async with openai_client(ScriptedEngine("a€")) as client:
        reply = await client.completions.create(
            model="test/scripted", prompt="xyz", max_tokens=9, logprobs=2, echo=True
        )
    logprobs = reply.choices[0].logprobs
    assert reply.choices[0].text == "xyza€"
    assert logprobs.tokens == [*"xyza", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 4, 4]
    assert logprobs.token_logprobs == [None, *[-0.5] * 6]
    assert logprobs.top_logprobs[0] is None
    assert logprobs.top_logprobs[3] == {"a": -0.5, "b": -1.5}


async def test_echoed_offsets_skip_a_bos_that_is_not_in_the_text() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    engine = ScriptedEngine("z")
    async with serve(engine, tokenizer) as client:
        body = {"prompt": "é<|user|>b", "echo": True, "logprobs": 0}
        reply = (await client.post("/completions", json=body)).json()
        await client.post("/completions", json=body | {"add_special_tokens": False})
    logprobs = reply["choices"][0]["logprobs"]
    assert reply["choices"][0]["text"] == "é<|user|>bz"
    assert logprobs["tokens"][0] == "<s>"
    assert logprobs["text_offset"] == [0, 0, 0, 1, 9, 10]
    assert [each.prompt_token_ids[0] == BOS for each in engine.requests] == [True, False]


async def test_choices_share_a_seed_and_differ_in_their_index() -> None:
    engine = ScriptedEngine()
    body = {"prompt": [[1], [2]], "n": 2, "max_tokens": 1}
    async with serve(engine) as client:
        replies = [
            (await client.post("/completions", json=body | seed)).json()
            for seed in ({"seed": 9}, {}, {})
        ]
    keys = [(each.sampling.seed, each.sampling.choice_index) for each in engine.requests]
    # Drawn seeds are reported, and equal by chance once in 2**53 runs; no client rounds them.
    _, first, second = seeds = [reply["seed"] for reply in replies]
    assert seeds[0] == 9
    assert max(seeds) < 2**53
    assert first != second
    assert keys == [(seed, index) for seed in seeds for index in (0, 1, 0, 1)]
    prompts = [each.prompt_token_ids for each in engine.requests]
    assert prompts == [(1,), (1,), (2,), (2,)] * 3
    assert [choice["index"] for choice in replies[0]["choices"]] == [0, 1, 2, 3]
    assert len({each.request_id for each in engine.requests}) == 12


async def test_usage_accounts_for_speculation() -> None:
    async with openai_client(ScriptedEngine(TEXT)) as client:
        reply = await client.completions.create(
            model="test/scripted",
            prompt="ab",
            extra_body={"speculative": {"draft_strategy": "ngram", "num_speculative_tokens": 4}},
        )
    usage = reply.model_dump()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    assert usage["speculative"] == {
        "drafter": "ngram",
        "num_steps": 4,
        "num_drafts": 4,
        "num_draft_tokens": 10,
        "num_accepted_tokens": 7,
        "acceptance_rate": 0.7,
        "tokens_per_step": 2.75,
        "mean_gamma": 2.5,
        "acceptance_histogram": [1, 0, 2, 1],
        "accepted_per_position": [3, 3, 1],
        "estimated_speedup": 2.0,
        "draft_ms": 1.0,
        "verify_ms": 9.0,
        "gamma_changes": [
            {"choice": 0, "step": 0, "gamma": 4, "reason": "start"},
            {"choice": 0, "step": 2, "gamma": 3, "reason": "low acceptance"},
        ],
    }


TOLD: dict[str, Any] = {"prompt": "x", "speculative": {"return_drafted": True}}


async def test_drafted_tokens_are_told_on_request() -> None:
    engine = ScriptedEngine("a€b", group_sizes=(4, 1))
    (choice,) = (await post("/completions", TOLD, engine)).json()["choices"]
    assert choice["tokens"] == [
        {"id": 97, "text": "a", "drafted": True},
        {"id": 226, "text": "", "drafted": True},
        {"id": 130, "text": "", "drafted": True},
        {"id": 172, "text": "€", "drafted": False},
        {"id": 98, "text": "b", "drafted": False},
    ]
    assert (choice["num_steps"], choice["num_draft_tokens"]) == (2, 4 + 1)


async def test_text_that_ends_inside_a_character_is_still_given_out() -> None:
    (choice,) = (await post("/completions", TOLD, ScriptedEngine(b"a\xe2\x82"))).json()["choices"]
    assert choice["text"] == "".join(each["text"] for each in choice["tokens"]) == "a\ufffd"


async def test_a_chunk_tells_of_the_steps_whose_text_was_held_back() -> None:
    """Two steps each write a half of a character: one chunk, with both steps' drafts."""
    engine = ScriptedEngine("aé!", group_sizes=(1,))
    *chunks, _ = events((await post("/completions", TOLD | {"stream": True}, engine)).text)
    first, second = (chunk["choices"][0] for chunk in chunks[-2:])
    assert (first["text"], first["num_steps"], first["num_draft_tokens"]) == ("é", 2, 2)
    assert (second["text"], second["num_steps"]) == ("!", 1)


async def test_max_tokens_is_clamped_to_the_room_there_is() -> None:
    engine = ScriptedEngine(script=lambda _: [97] * 1000, info=engine_info(max_model_len=32))
    async with serve(engine) as client:
        reply = await client.post("/completions", json={"prompt": [1] * 30, "max_tokens": 32})
        default = await client.post("/completions", json={"prompt": [1] * 31})
        for prompt in ([1] * 32, "a" * 32, "a" * 100_000):
            refused = await client.post("/completions", json={"prompt": prompt})
            assert fault(refused) == (400, "context_length_exceeded")
            assert refused.json()["error"]["param"] == "prompt"
        for prompt in ("x" * 9000, [120] * 9000):
            body = {"prompt": prompt, "truncate_prompt_tokens": 31}
            assert (await client.post("/completions", json=body)).status_code == 200
    assert [each.sampling.max_tokens for each in engine.requests] == [2, 1, 1, 1]
    assert reply.json()["choices"][0]["finish_reason"] == "length"
    assert default.status_code == 200


@pytest.mark.parametrize(
    ("marks", "written"),
    [
        ("<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|fim_pad|>", "0def 1\n2"),
        ("<fim_prefix> <fim_suffix> <fim_middle> <file_sep>", "0def 1\n2"),
        ("<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜> <EOT>", "0def 1\n2"),
        ("▁<PRE> ▁<SUF> ▁<MID> ▁<EOT>", "0def 1\n2"),
        ("[PREFIX] [SUFFIX] [OTHER] <EOT>", "1\n0def "),
        # Named by a GGUF file alone.
        ("<before> <after> <gap> <EOT>", "0def 1\n2"),
    ],
)
async def test_a_gap_is_filled_by_the_marks_that_the_tokenizer_has(
    marks: str, written: str
) -> None:
    tokenizer, tokens = byte_tokenizer(), marks.split()
    tokenizer.init_kwargs["infill_tokens"] = [tokens[:3]] if "<gap>" in tokens else []
    # As in Qwen's, they need not be special.
    is_special = "<|fim_pad|>" not in tokens
    tokenizer.add_tokens([AddedToken(each, special=is_special) for each in tokens])
    ids = tokenizer.convert_tokens_to_ids(tokens)
    engine = ScriptedEngine(
        script=lambda _: [*b"f()", ids[3], *b"more", EOS], info=engine_info(vocab_size=300)
    )
    body, url = {"prompt": "def ", "suffix": "\n"}, "http://test/api"
    async with serve(engine, tokenizer) as client:
        ollama = await client.post(f"{url}/generate", json=body | {"stream": False})
        # Who is not trusted with special tokens spells none.
        spelled = {"prompt": f"{tokens[1]}a", "allow_special_tokens": False}
        changed = ({}, {"ignore_eos": True}, {"suffix": ""}, spelled)
        taken = [await client.post("/completions", json=body | each) for each in changed]
        at_odds = {"echo": True, "truncate_prompt_tokens": 3, "prompt": [1]}
        for name, value in at_odds.items():
            refused = await client.post("/completions", json=body | {name: value})
            assert refused.json()["error"]["param"] == name
        assert (await client.get("/models")).json()["data"][0]["fills_in"]
        shown = (await client.post(f"{url}/show", json={})).json()
    assert "insert" in shown["capabilities"]
    *prompts, of_spelled = [
        "".join(chr(each) if each < 256 else str(ids.index(each)) for each in found)
        for found in (each.prompt_token_ids for each in engine.requests)
    ]
    assert prompts == [written, written, written, "def "]
    assert of_spelled.count("1") == (1 if is_special else 2)
    texts = [each.json()["choices"][0]["text"] for each in taken]
    assert texts[0] == ollama.json()["response"] == "f()"
    assert texts[1].endswith("more")


async def test_a_batch_of_prompts_bills_each_prompt_once() -> None:
    body = {"prompt": ["a", "bcd"], "n": 2}
    usage = (await post("/completions", body, ScriptedEngine("abc"))).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 12)
    # Choice 0 of each prompt found 3; later choices find what the first put there.
    assert usage["prompt_tokens_details"]["cached_tokens"] == 6


async def test_an_immediate_eos_still_answers() -> None:
    body = {"prompt": "a"}
    async with serve(ScriptedEngine(script=lambda _: [EOS])) as client:
        whole = (await client.post("/completions", json=body)).json()
        streamed = await client.post("/completions", json=body | {"stream": True})
    assert (whole["choices"][0]["text"], whole["usage"]["completion_tokens"]) == ("", 0)
    assert events(streamed.text)[0]["choices"][0]["finish_reason"] == "stop"
    assert streamed.text.endswith("data: [DONE]\n\n")
    # So that proxies do not buffer it.
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["cache-control"] == "no-cache"
    assert streamed.headers["x-accel-buffering"] == "no"


async def test_every_chunk_counts_the_tokens_so_far() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 99, "stream": True}
    async with serve(ScriptedEngine(TEXT)) as client:
        reply = await client.post("/completions", json=body | {"stream_options": options})
        alone = {"stream_options": {"continuous_usage_stats": True}}
        other = await client.post("/completions", json=body | alone)
    *chunks, last, _ = events(reply.text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == last["usage"]["completion_tokens"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {5}
    assert all(
        u["total_tokens"] == 5 + u["completion_tokens"] for u in (c["usage"] for c in chunks)
    )
    # Alone it counts nothing, as in vLLM.
    assert other.headers[IGNORED_HEADER] == "stream_options.continuous_usage_stats"
    assert IGNORED_HEADER not in reply.headers
    assert not any("usage" in chunk for chunk in events(other.text)[:-1])


async def test_prompt_logprobs_and_an_echo_share_what_is_scored() -> None:
    """One shows what it was asked for, whatever the other wants."""
    engine = ScriptedEngine("a")
    base = {"prompt": "xy", "echo": True}
    body = base | {"logprobs": 0, "prompt_logprobs": 2}
    async with serve(engine) as client:
        reply = (await client.post("/completions", json=body)).json()
        silent = (await client.post("/completions", json=body | {"echo": False})).json()
        for fields in ({"logprobs": 3, "echo": False}, {"logprobs": 3}, {}):
            await client.post("/completions", json=base | fields)
    assert [each.sampling.prompt_logprobs for each in engine.requests] == [2, 2, None, 3, None]
    choice = reply["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert list(choice["prompt_logprobs"][1]) == ["121", "122"]
    assert choice["logprobs"]["tokens"] == ["x", "y", "a"]
    assert choice["logprobs"]["top_logprobs"] == [None, {"y": -0.5}, {"a": -0.5}]
    assert silent["choices"][0]["logprobs"]["tokens"] == ["a"]
    assert silent["choices"][0]["prompt_logprobs"] == choice["prompt_logprobs"]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "789"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "123"),
        ({"truncate_prompt_tokens": 9}, "123456789"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 505}, "3456789"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 512}, "9"),
    ],
)
@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_prompt_is_cut_to_so_many_tokens(
    fields: dict[str, Any], kept: str, as_ids: bool
) -> None:
    engine = ScriptedEngine("a")
    prompt = [*b"123456789"] if as_ids else "123456789"
    body = {"prompt": prompt, "echo": True, "max_tokens": 5} | fields
    reply = await post("/completions", body, engine)
    assert reply.json()["choices"][0]["text"] == kept + "a"
    assert reply.json()["usage"]["prompt_tokens"] == len(kept)
    assert engine.requests[0].prompt_token_ids == tuple(kept.encode())


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
async def test_a_reply_has_its_account_in_vllms_words_too(path: str) -> None:
    """Where aiperf and guidellm look: at the root, in streams on the last chunk before the end."""
    messages = [{"role": "user", "content": "a"}]
    asked: dict[str, Any] = {"prompt": "a"} if path == "/completions" else {"messages": messages}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    async with serve(ScriptedEngine(TEXT)) as client:
        whole = (await client.post(path, json=asked)).json()
        *chunks, last, done = events((await client.post(path, json=asked | streamed)).text)
    assert done == "[DONE]"
    assert last["metrics"] == whole["metrics"]
    assert not any("metrics" in chunk for chunk in chunks)
    account, own = whole["metrics"]["speculative_decoding"], whole["usage"]["speculative"]
    assert account["num_spec_steps"] == own["num_drafts"] == sum(account["acceptance_histogram"])
    assert account["num_draft_tokens"] == own["num_draft_tokens"]
    weighed = sum(k * count for k, count in enumerate(account["acceptance_histogram"]))
    assert account["num_accepted_draft_tokens"] == weighed == own["num_accepted_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_named_tokens_are_scored_and_no_others(stream: bool) -> None:
    """Beside the token itself, which comes first; an echoed prompt has them, too."""
    engine = ScriptedEngine("a")
    named = [ord("c"), ord("b")]
    body = {"prompt": "xy", "logprobs": 2, "logprob_token_ids": named, "stream": stream}
    reply = await post("/completions", body | {"echo": True}, engine)
    chunks = events(reply.text)[:-1] if stream else [reply.json()]
    found = [each for chunk in chunks for each in chunk["choices"][0]["logprobs"]["top_logprobs"]]
    assert found[0] is None
    assert list(found[1]) == ["y", "c", "b"]
    assert list(found[2].items()) == [("a", -0.5), ("c", -2.5), ("b", -1.5)]
    assert reply.headers[IGNORED_HEADER] == "logprobs"
