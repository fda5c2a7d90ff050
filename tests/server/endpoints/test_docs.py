"""The reference of the API, as a browser asks for it."""

from __future__ import annotations

from html.parser import HTMLParser
from importlib.resources import files

import httpx
import pytest
from fastapi import FastAPI

from worlds.scripted_engine import ScriptedEngine
from worlds.serving import Connect

pytestmark = pytest.mark.anyio

ORIGIN = httpx.URL("http://test/docs")


class Addresses(HTMLParser):
    """What a page loads or links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.found += [value for name, value in attrs if name in ("src", "href") and value]


async def test_the_page_loads_nothing_from_elsewhere(connect: Connect) -> None:
    async with connect(ScriptedEngine(), api_key="s3cret") as client:
        page = await client.get(ORIGIN)
        assert page.headers["content-type"].startswith("text/html")
        asked = [ORIGIN.join(each) for each in Addresses(page.text).found]
        replies = {url: await client.get(url) for url in asked}
        schema = (await client.get("http://test/openapi.json")).json()
    assert {url.host for url in asked} == {ORIGIN.host}
    assert {url: reply.status_code for url, reply in replies.items()} == dict.fromkeys(asked, 200)
    shipped = {each.name for each in (files("server") / "reference").iterdir()}
    assert shipped - {"index.html"} <= {url.path.rpartition("/")[2] for url in asked}
    by_name = {url.path.rpartition("/")[2]: reply for url, reply in replies.items()}
    assert "SwaggerUIBundle" in by_name["swagger-ui-bundle.js"].text
    assert ".swagger-ui" in by_name["swagger-ui.css"].text
    assert "/v1/chat/completions" in schema["paths"]


async def test_its_policy_lets_no_other_server_in(connect: Connect) -> None:
    async with connect(ScriptedEngine()) as client:
        reply = await client.get(ORIGIN)
    directives = reply.headers["content-security-policy"].split("; ")
    policy = dict(each.split(" ", 1) for each in directives)
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert not any("http" in sources or "*" in sources for sources in policy.values())


@pytest.mark.parametrize("path", ["docs/nothing.js", "docs/..%2Fapp.py", "redoc"])
async def test_nothing_else_is_served(connect: Connect, path: str) -> None:
    async with connect(ScriptedEngine()) as client:
        assert (await client.get(f"http://test/{path}")).status_code == 404


async def test_frameworks_own_pages_would_load_from_elsewhere() -> None:
    """Once they do not, this file of ours can go."""
    transport = httpx.ASGITransport(FastAPI())
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert "https://" in (await client.get("/docs")).text
