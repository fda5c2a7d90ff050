"""The playground and the reference of the API, as a browser asks for them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files

import httpx
import pytest

from worlds.scripted_engine import ScriptedEngine, byte_tokenizer
from worlds.serving import serve

TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
DOCUMENTS = {"docs", "metrics"}
"""Links to what is not the page's own."""
PLAYGROUND, REFERENCE = httpx.URL("http://test/"), httpx.URL("http://test/docs")


class Addresses(HTMLParser):
    """The addresses that a page loads or links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.found += [value for name, value in attrs if name in ("src", "href") and value]


@pytest.mark.parametrize(("page", "folder"), [(PLAYGROUND, "playground"), (REFERENCE, "reference")])
async def test_a_page_and_all_it_asks_for_are_served_without_the_apis_key(
    page: httpx.URL, folder: str
) -> None:
    """Followed from the page, all addresses lead to files of ours, and to each of them."""
    async with serve(ScriptedEngine(), api_key="s3cret") as client:
        seen: dict[str, httpx.Response] = {}
        wanted = [page]
        while wanted:
            url = wanted.pop()
            if url.path in seen:
                continue
            assert url.host == page.host
            reply = seen[url.path] = await client.get(url)
            assert reply.status_code == 200, url
            suffix = "." + (url.path.rpartition(".")[2] if url != page else "html")
            assert reply.headers["content-type"].partition(";")[0] == TYPES[suffix]
            if suffix == ".html":
                found = Addresses(reply.text).found
                wanted += [
                    url.join(each) for each in found if each[0] != "#" and each not in DOCUMENTS
                ]
            elif suffix == ".js":
                modules = re.findall(r'^import .* from "(.+)";$', reply.text, re.MULTILINE)
                wanted += [url.join(name) for name in modules]
        assert (await client.get("/drafters")).status_code == 401
        schema = (await client.get("http://test/openapi.json")).json()
    shipped = {each.name for each in (files("server") / folder).iterdir()}
    theirs = {"swagger-ui-bundle.js", "swagger-ui.css"} if page == REFERENCE else set()
    names = {"index.html" if path == page.path else path.rpartition("/")[2] for path in seen}
    assert names - {"openapi.json"} == shipped | theirs | ({"icon.svg"} & names)
    assert "/v1/chat/completions" in schema["paths"]


@pytest.mark.parametrize("page", [PLAYGROUND, REFERENCE])
async def test_a_policy_keeps_the_page_to_its_server(
    client: httpx.AsyncClient, page: httpx.URL
) -> None:
    reply = await client.get(page)
    directives = reply.headers["content-security-policy"].split("; ")
    policy = {name: sources for name, _, sources in (each.partition(" ") for each in directives)}
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert not any("http" in sources or "*" in sources for sources in policy.values())
    if page == PLAYGROUND:
        assert policy["style-src"] == policy["img-src"] == "'self'"
    # Inline code and styles are what this policy refuses.
    assert not re.search(r"<script>|<style|\sstyle=|\son\w+=", reply.text)
    assert reply.headers["x-content-type-options"] == "nosniff"


NOWHERE = ("nothing.js", "..%2Fpage.py", "%2e%2e%2fpage.py", "")


@pytest.mark.parametrize(
    "path", [*(f"{place}/{name}" for place in ("playground", "docs") for name in NOWHERE), "redoc"]
)
async def test_nothing_else_is_served(client: httpx.AsyncClient, path: str) -> None:
    reply = await client.get(f"http://test/{path}", follow_redirects=False)
    assert reply.status_code == (307 if path == "docs/" else 404)
    if path != "docs/":
        assert reply.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("template", ["{{ messages[0]['content'] }}", None])
async def test_the_model_card_tells_of_a_chat_and_of_attention(template: str | None) -> None:
    async with serve(ScriptedEngine(), byte_tokenizer(template)) as client:
        (card,) = (await client.get("/models")).json()["data"]
    assert card["has_chat_template"] == (template is not None)
    assert card["attention_backend"] == "paged"
