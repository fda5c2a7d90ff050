"""Whatever a body holds, its answer is one that the schema tells of, and no fault of the server's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.apis.ollama.request import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from server.apis.openai.request import EmbeddingsRequest
from server.apis.openai.tokens import DetokenizeRequest, TokenizeRequest
from worlds.request_bodies import CHAT, COMPLETION, ENDPOINTS
from worlds.scripted_engine import ScriptedEngine, engine_info
from worlds.serving import events, serve

Post = Callable[[str, bytes], httpx.Response]
PATHS = {f"/v1{path}": model for path, (model, *_) in ENDPOINTS.items()} | {
    "/v1/embeddings": EmbeddingsRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/show": OllamaShowRequest,
    "/api/embed": OllamaEmbedRequest,
}
BASES = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/embeddings": {"input": "a"},
    "/api/chat": {"messages": CHAT["messages"]},
    "/api/embed": {"input": "a"},
}
GIVEN = [fields for _, _, effective, _ in ENDPOINTS.values() for fields, _ in effective.values()]
"""Fields that are taken, some only next to others."""

# Half characters and special tokens among them.
TEXTS = st.text(st.sampled_from("a é\n\0\ud83d\ude00\ue000<>|{}"), max_size=4) | st.sampled_from(
    ["<|user|>", "</s>", "auto", "text", "json", "user", "assistant", "content", "ngram", "1"]
)
NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 269, 270, 2**31, 10**30, -0.5, 0.5, 1e300, 5e-324])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(TEXTS, parts, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def post() -> Iterator[Post]:
    """Sends bodies to one server, which serves all of them."""
    with asyncio.Runner() as runner:
        info = engine_info(embeddings="mean", hidden_size=2)
        server = serve(ScriptedEngine("hello", info=info))
        client = runner.run(server.__aenter__())

        def send(path: str, content: bytes) -> httpx.Response:
            headers = {"content-type": "application/json"}
            url = f"http://test{path}"
            return runner.run(client.post(url, content=content, headers=headers))

        yield send
        runner.run(server.__aexit__(None, None, None))


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """Returns bodies of known fields: some as they should be, some as they happen to be."""
    names = [*PATHS[path].model_fields, *PATHS[path].unsupported, *PATHS[path].fixed]
    nested = st.sampled_from(["speculative", "stream_options", "prediction", "response_format"])
    inside = st.sampled_from(
        ["type", "include_usage", "draft_strategy", "verification", "options", "content"]
    )
    objects = st.dictionaries(inside, VALUES, max_size=2)
    return st.builds(
        lambda base, taken, odd, deep: {
            **base,
            **{k: v for t in taken for k, v in t.items()},
            **odd,
            **deep,
        },
        st.sampled_from([BASES.get(path, {"prompt": "a"}), {}]),
        st.lists(st.sampled_from(GIVEN), max_size=3),
        st.dictionaries(st.sampled_from(names), VALUES, max_size=3),
        st.dictionaries(nested, objects, max_size=1),
    )


@pytest.mark.parametrize("path", PATHS)
@given(data=st.data())
def test_every_answer_is_one_that_is_told(post: Post, path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(path))
    reply = post(path, json.dumps(body).encode())
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        error = reply.json()["error"]
        if path.startswith("/api"):
            assert isinstance(error, str)
        else:
            more = {"details"} if path == "/v1/messages" else set()
            assert error.keys() == {"message", "type", "param", "code"} | more
        assert error if path.startswith("/api") else error["message"]
    elif reply.headers["content-type"] == "application/x-ndjson":
        assert not any("error" in json.loads(line) for line in reply.text.splitlines())
    elif reply.text.startswith("data: "):
        *chunks, done = events(reply.text)
        assert done == "[DONE]"
        assert not any("error" in chunk for chunk in chunks)


@pytest.mark.parametrize("path", PATHS)
@given(content=st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_bytes_of_any_kind_are_answered(post: Post, path: str, content: bytes) -> None:
    assert post(path, content).status_code in (200, 400, 404)
