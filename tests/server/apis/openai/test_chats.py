from __future__ import annotations

from server.plan import IGNORED_HEADER
from worlds.official_clients import openai_client
from worlds.request_bodies import CHAT
from worlds.scripted_engine import ASSISTANT, USER, ScriptedEngine, byte_tokenizer
from worlds.serving import events, fault, post, serve

TEXT = "hello wörld, 100 € spent"
MESSAGES = [{"role": "user", "content": "hi"}]


async def test_the_openai_client_chats() -> None:
    engine = ScriptedEngine(TEXT)
    async with openai_client(engine) as client:
        reply = await client.chat.completions.create(model="test/scripted", messages=MESSAGES)
        (choice,) = reply.choices
        # Clients send back what ``model_dump`` gives, nulls included.
        replayed = [*MESSAGES, choice.message.model_dump(), *MESSAGES]
        again = await client.chat.completions.create(model="test/scripted", messages=replayed)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert choice.message.content == again.choices[0].message.content == TEXT
    assert reply.usage.completion_tokens == len(TEXT.encode())
    assert reply.usage.model_dump()["speculative"]["num_accepted_tokens"] == 7
    request = engine.requests[0]
    assert request.sampling.max_tokens == 512 - len(request.prompt_token_ids)


async def test_messages_go_through_the_chat_template() -> None:
    engine = ScriptedEngine(TEXT)
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    await post("/chat/completions", {"messages": messages}, engine)
    expected = [USER, *b"system: be brief\n", USER, *b"user: a\nb\n", ASSISTANT]
    assert list(engine.requests[0].prompt_token_ids) == expected


async def test_two_choices_stream_interleaved() -> None:
    async with openai_client(ScriptedEngine(TEXT, group_sizes=(3,))) as client:
        stream = await client.chat.completions.create(
            model="test/scripted",
            messages=MESSAGES,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    order = [chunk.choices[0].index for chunk in chunks[:-1]]
    assert order != sorted(order)
    for index in (0, 1):
        deltas = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert deltas[0].delta.role == "assistant"
        assert all(each.delta.role is None for each in deltas[1:])
        assert "".join(each.delta.content or "" for each in deltas) == TEXT
        assert deltas[-1].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 2 * len(TEXT.encode())


async def test_logprobs_have_openai_shape() -> None:
    async with openai_client(ScriptedEngine("a€")) as client:
        reply = await client.chat.completions.create(
            model="test/scripted", messages=MESSAGES, logprobs=True, top_logprobs=2
        )
    logprobs = reply.choices[0].logprobs
    assert [entry.token for entry in logprobs.content][:2] == ["a", "bytes:\\xe2"]
    assert [entry.bytes for entry in logprobs.content] == [[97], [0xE2], [0x82], [0xAC]]
    assert [entry.logprob for entry in logprobs.content] == [-0.5] * 4
    top = logprobs.content[0].top_logprobs
    found = [(each.token, each.logprob, each.bytes) for each in top]
    assert found == [("a", -0.5, [97]), ("b", -1.5, [98])]


async def test_streamed_logprobs_come_with_their_text() -> None:
    body = {"messages": MESSAGES, "logprobs": True, "stream": True, "stop": "rld"}
    *chunks, _ = events((await post("/chat/completions", body, ScriptedEngine(TEXT))).text)
    seen, text = b"", ""
    for chunk in chunks:
        choice = chunk["choices"][0]
        text += choice["delta"].get("content", "")
        seen += bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
        assert seen.decode(errors="ignore") == text
    assert text == "hello wö"


async def test_a_tokenizer_without_a_template_is_a_400() -> None:
    tokenizer = byte_tokenizer(chat_template=None)
    refused = await post("/chat/completions", {"messages": MESSAGES}, ScriptedEngine(), tokenizer)
    assert fault(refused, "param") == (400, "messages")
    assert "no chat template" in refused.json()["error"]["message"]


# --- predicted outputs ---


async def test_a_prediction_is_drafted_from_and_accounted() -> None:
    engine = ScriptedEngine(TEXT)
    async with openai_client(engine) as client:
        reply = await client.chat.completions.create(
            model="test/scripted",
            messages=MESSAGES,
            prediction={"type": "content", "content": "hello world"},
        )
    request = engine.requests[0]
    assert request.speculative.draft_strategy == "prediction"
    assert request.prediction_token_ids == tuple(b"hello world")
    details = reply.usage.completion_tokens_details
    stats = reply.usage.model_dump()["speculative"]
    assert details.accepted_prediction_tokens == stats["num_accepted_tokens"] > 0
    assert details.rejected_prediction_tokens == (
        stats["num_draft_tokens"] - stats["num_accepted_tokens"]
    )


async def test_an_echo_of_the_last_message_begins_a_stream_too() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "so: "}]
    body = {"messages": messages, "echo": True, "stream": True}
    body |= {"add_generation_prompt": False, "continue_final_message": True}
    reply = await post("/chat/completions", body, ScriptedEngine(TEXT))
    deltas = [each["choices"][0]["delta"] for each in events(reply.text)[:-1]]
    assert "".join(each.get("content", "") for each in deltas) == "so: " + TEXT


async def test_tokens_may_be_named_by_their_ids() -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    reply = await post("/chat/completions", body, ScriptedEngine("a"))
    (entry,) = reply.json()["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["top_logprobs"][0]["token"]) == ("token_id:97", "token_id:97")
    assert entry["bytes"] == [97]


async def test_named_tokens_come_instead_of_the_likeliest() -> None:
    """With the token that was written, as in vLLM; a number of the likeliest has no effect."""
    engine = ScriptedEngine("a")
    body = {**CHAT, "logprobs": True, "logprob_token_ids": [ord("c"), ord("b")]}
    async with serve(engine) as client:
        replies = [
            await client.post("/chat/completions", json=body | {"top_logprobs": num})
            for num in (0, 2)
        ]
    for reply in replies:
        (entry,) = reply.json()["choices"][0]["logprobs"]["content"]
        top = [(each["token"], each["logprob"]) for each in entry["top_logprobs"]]
        assert top == [("a", -0.5), ("c", -2.5), ("b", -1.5)]
    assert [each.headers.get(IGNORED_HEADER) for each in replies] == [None, "top_logprobs"]


async def test_of_the_prompt_is_told_once_beside_the_choices() -> None:
    body = {**CHAT, "n": 2, "return_token_ids": True, "prompt_logprobs": 2}
    engine = ScriptedEngine("ab")
    async with serve(engine) as client:
        whole = (await client.post("/chat/completions", json=body)).json()
        plain = (await client.post("/chat/completions", json=CHAT)).json()
        reply = await client.post("/chat/completions", json=body | {"stream": True})
    *chunks, _ = events(reply.text)
    told = list(engine.requests[0].prompt_token_ids)
    assert whole["prompt_token_ids"] == told
    first, second, *_ = whole["prompt_logprobs"]
    assert first is None
    assert second == {
        str(each): {"logprob": -0.5 - rank, "rank": rank + 1, "decoded_token": chr(each)}
        for rank, each in enumerate((told[1], told[1] + 1))
    }
    assert len(whole["prompt_logprobs"]) == len(told)
    found = [each["prompt_logprobs"] for each in chunks if "prompt_logprobs" in each]
    assert found == [whole["prompt_logprobs"]]
    assert [each["token_ids"] for each in whole["choices"]] == [[*b"ab"]] * 2
    assert not any("prompt_token_ids" in each for each in whole["choices"])
    assert [each["prompt_token_ids"] for each in chunks if "prompt_token_ids" in each] == [told]
    # As in vLLM they are there, if they were not asked for.
    assert plain["prompt_token_ids"] is plain["prompt_logprobs"] is None
    assert plain["choices"][0]["token_ids"] is None
