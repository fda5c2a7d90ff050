"""The playground's files, as a browser asks for them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files

import httpx
import pytest

from worlds.scripted_engine import ScriptedEngine, byte_tokenizer
from worlds.serving import Connect

pytestmark = pytest.mark.anyio

TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
ORIGIN = httpx.URL("http://test/")


class Addresses(HTMLParser):
    """What a page loads or links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.found += [value for name, value in attrs if name in ("src", "href") and value]


async def test_the_page_and_all_it_asks_for_are_served(connect: Connect) -> None:
    """Followed from the page, all addresses lead to files of the package, and to each of them."""
    async with connect(ScriptedEngine()) as client:
        seen: dict[str, httpx.Response] = {}
        wanted = [ORIGIN]
        while wanted:
            url = wanted.pop()
            if url.path in seen:
                continue
            assert url.host == ORIGIN.host
            reply = seen[url.path] = await client.get(url)
            assert reply.status_code == 200, url
            suffix = "." + (url.path.rpartition(".")[2] if url != ORIGIN else "html")
            assert reply.headers["content-type"].partition(";")[0] == TYPES[suffix]
            if suffix == ".html":
                wanted += [url.join(each) for each in Addresses(reply.text).found if each[0] != "#"]
            elif suffix == ".js":
                names = re.findall(r'^import .* from "(.+)";$', reply.text, re.MULTILINE)
                wanted += [url.join(name) for name in names]
    shipped = {each.name for each in (files("server") / "playground").iterdir()}
    assert {path.rpartition("/")[2] or "index.html" for path in seen} == shipped


async def test_the_policy_of_contents_keeps_the_page_to_its_server(connect: Connect) -> None:
    async with connect(ScriptedEngine()) as client:
        reply = await client.get(ORIGIN)
    directives = reply.headers["content-security-policy"].split("; ")
    policy = {name: sources for name, _, sources in (each.partition(" ") for each in directives)}
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect", "img")} == {"'self'"}
    # Inline code and styles are what this policy refuses.
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=", reply.text)
    assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fpage.py", "%2e%2e%2fpage.py", ""])
async def test_nothing_else_is_served(connect: Connect, name: str) -> None:
    async with connect(ScriptedEngine()) as client:
        reply = await client.get(f"http://test/playground/{name}")
    assert reply.status_code == 404
    assert reply.json()["error"]["type"] == "not_found_error"


async def test_the_page_loads_without_the_key_that_the_api_wants(connect: Connect) -> None:
    async with connect(ScriptedEngine(), api_key="s3cret") as client:
        assert (await client.get(ORIGIN)).status_code == 200
        assert (await client.get("http://test/playground/main.js")).status_code == 200
        assert (await client.get("/drafters")).status_code == 401


@pytest.mark.parametrize("template", ["{{ messages[0]['content'] }}", None])
async def test_the_model_card_tells_of_a_chat_and_of_attention(
    connect: Connect, template: str | None
) -> None:
    async with connect(ScriptedEngine(), byte_tokenizer(template)) as client:
        (card,) = (await client.get("/models")).json()["data"]
    assert card["has_chat_template"] == (template is not None)
    assert card["attention_backend"] == "paged"
