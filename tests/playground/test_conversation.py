"""The playground's conversation in a real browser, before an engine that says what the test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, expect

from engine.request.info import AdapterInfo
from engine.request.params import GenerationRequest
from worlds.browser_visit import PHONE, WIDE, Visit, visit
from worlds.client_servers import slipstream, wait_for
from worlds.scripted_engine import EOS, ScriptedEngine, engine_info

pytestmark = pytest.mark.slow

LIST = "# Tips\n\n1. **Sleep** early\n2. Read `books`\n\n```python\nprint(1)\n```"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def answering(*texts: str) -> ScriptedEngine:
    """Its n-th request gets the n-th text, and those after the last one get that."""
    engine: ScriptedEngine

    def script(_: GenerationRequest) -> list[int]:
        return [*texts[min(len(engine.requests), len(texts)) - 1].encode(), EOS]

    engine = ScriptedEngine(script=script, info=engine_info(max_model_len=4096))
    return engine


@contextmanager
def talk(browser: Browser, engine: ScriptedEngine, **context: Any) -> Iterator[Visit]:
    """The conversation, empty."""
    with slipstream(engine) as url, visit(browser, url, **context) as page:
        page.load()
        page.converse()
        yield page


def said(page: Visit) -> list[str]:
    return page.page.locator("#turns .said").all_inner_texts()


def test_turns_are_sent_whole_and_drafted_tokens_are_marked_in_rendered_text(
    browser: Browser,
) -> None:
    with talk(browser, answering(LIST, "Good night.")) as page:
        page.page.get_by_label("System prompt").fill("Be short.")
        page.say("How do I sleep?")
        answer = page.page.locator("#turns li.assistant .said")
        expect(answer.locator("h3")).to_have_text("Tips")
        expect(answer.locator("ol > li")).to_have_text(["Sleep early", "Read books"])
        expect(answer.locator("ol > li > strong")).to_have_text("Sleep")
        expect(answer.locator("pre > code")).to_have_text("print(1)\n")
        # Steps of 1, 3 and 2 tokens, bytes here, and all but the last of each are drafts.
        drafts = {at for at in range(len(LIST)) if at % 6 in (1, 2, 4)}
        ends = 0
        expected = ""
        for shown in ("Tips", "Sleep", " early", "Read ", "books", "print(1)"):
            begins = LIST.index(shown, ends)
            ends = begins + len(shown)
            expected += "".join(LIST[at] for at in range(begins, ends) if at in drafts)
        assert "".join(answer.locator(".drafted").all_text_contents()) == expected
        page.say("Thank you.")
        first, second = page.bodies()
        asked = [{"role": "system", "content": "Be short."}]
        asked += [{"role": "user", "content": "How do I sleep?"}]
        assert first["messages"] == asked
        answered = [
            {"role": "assistant", "content": LIST},
            {"role": "user", "content": "Thank you."},
        ]
        assert second["messages"] == asked + answered
        assert first["speculative"] == {"return_drafted": True}
        told = page.page.locator("#turns .below > p").last.inner_text()
        assert told.startswith("11 tokens in ")
        # Once for an answer, however many tokens it has.
        expect(page.page.locator("#said")).to_have_text(f"The answer is there. {told}")


def test_an_answer_can_be_copied_and_given_anew(browser: Browser) -> None:
    with talk(browser, answering("*one*", "two"), permissions=["clipboard-read"]) as page:
        page.say("Count.")
        page.page.get_by_role("button", name="Copy").last.click()
        expect(page.page.locator("#turns").get_by_role("button", name="Copied")).to_be_visible()
        assert page.page.evaluate("navigator.clipboard.readText()") == "*one*"
        page.page.get_by_role("button", name="Regenerate").click()
        page.wait_for_answer()
        expect(page.page.locator("#turns .assistant .said")).to_have_text("two")
        assert said(page) == ["Count.", "two"]
        first, again = page.bodies()
        assert first["messages"] == again["messages"]


def test_the_conversation_lasts_as_long_as_its_tab(browser: Browser) -> None:
    with talk(browser, answering("**bold**")) as page:
        page.page.get_by_label("System prompt").fill("Be bold.")
        page.say("Hello")
        page.page.reload()
        expect(page.page.locator("#turns strong")).to_have_text("bold")
        assert page.page.locator("#turns .drafted").count() > 0
        expect(page.page.get_by_label("System prompt")).to_have_value("Be bold.")
        assert page.page.evaluate("localStorage.length + document.cookie.length") == 0
        page.page.get_by_role("button", name="New conversation").click()
        assert said(page) == []
        page.page.reload()
        expect(page.page.locator("#nothing-said")).to_be_visible()


class Hold(asyncio.Event):
    """An engine's gate that is shut after so many events."""

    def __init__(self, engine: ScriptedEngine, num_events: int) -> None:
        super().__init__()
        self._engine, self._num_events = engine, num_events

    async def wait(self) -> Literal[True]:
        return self._engine.num_events < self._num_events or await super().wait()


def test_an_answer_stops_and_what_was_written_stays(browser: Browser) -> None:
    engine = answering("abcdefghijklmnopqrstuvwxyz")
    engine.gate = Hold(engine, 4)
    with talk(browser, engine) as page:
        page.page.locator("#message").fill("Go on")
        page.page.locator("#send").focus()
        page.page.keyboard.press("Enter")
        expect(page.page.locator("#stop-answer")).to_be_focused()
        answer = page.page.locator("#turns .assistant .said")
        expect(answer).to_have_text("abcdefg")
        page.page.keyboard.press("Escape")
        page.wait_for_answer()
        expect(page.page.locator("#send")).to_be_focused()
        expect(page.page.locator("#turns .below > p")).to_contain_text("stopped")
        expect(answer).to_have_text("abcdefg")
        wait_for(lambda: engine.num_open == 0)
        # Nothing written: there is nothing to send along.
        page.page.get_by_role("button", name="Regenerate").click()
        expect(answer).to_have_text("…")
        page.page.keyboard.press("Escape")
        page.wait_for_answer()
        expect(answer).to_have_text("")
        assert [each["role"] for each in json.loads(page.code("JSON"))["messages"]] == ["user"]


def test_a_tool_is_called_and_answered(browser: Browser) -> None:
    with talk(browser, answering(CALL, "It rains.")) as page:
        page.page.locator("#shape > summary").click()
        page.page.get_by_role("button", name="Insert an example of a tool").click()
        page.page.get_by_label("The model has to call one").check()
        page.say("How is the weather in Oslo?")
        expect(page.page.locator("#turns pre")).to_have_text('get_weather({"city": "Oslo"})')
        page.page.get_by_label("What get_weather returns").fill("rain")
        page.page.get_by_role("button", name="Send the result").click()
        page.wait_for_answer()
        assert said(page)[2:] == ["rain", "It rains."]
        first, second = page.bodies()
        assert first["tool_choice"] == "required"
        assert "tool_choice" not in second
        assert first["tools"] == second["tools"]
        call, result = second["messages"][1:]
        assert call["tool_calls"][0]["function"]["name"] == "get_weather"
        assert result["tool_call_id"] == call["tool_calls"][0]["id"]
        assert result["content"] == "rain"


def test_a_schema_goes_with_the_request_and_what_is_no_json_stays_here(browser: Browser) -> None:
    with talk(browser, answering('{"title": "x", "tips": ["y", "z"]}')) as page:
        page.page.locator("#shape > summary").click()
        page.page.locator("#schema").fill("{title}")
        page.say("Tips?")
        field = page.page.locator("#schema")
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(page.page.locator("#turns .error")).to_contain_text("This is no JSON")
        assert page.bodies() == []
        page.page.get_by_role("button", name="Insert an example of a schema").click()
        page.page.get_by_role("button", name="Try again").click()
        page.wait_for_answer()
        expect(field).not_to_have_attribute("aria-invalid", "true")
        (body,) = page.bodies()
        assert body["response_format"]["json_schema"]["schema"]["required"] == ["title", "tips"]
        assert body["messages"] == [{"role": "user", "content": "Tips?"}]


def test_an_adapter_can_be_chosen(browser: Browser) -> None:
    engine = answering("yes")
    pirate = AdapterInfo("pirate", "somewhere", "0f" * 32, 8, 14, 4096, 16384, None)
    engine.info = replace(engine.info, adapters=(pirate,))
    with slipstream(engine) as url, visit(browser, url) as page:
        page.load()
        page.page.locator("#prompt").fill("Kept.")
        page.page.locator("#model-name").select_option("pirate")
        page.converse()
        page.say("Hello")
        assert page.bodies()[-1]["model"] == "pirate"
        assert "model=pirate" in page.page.url
        page.page.get_by_role("link", name="Race").click()
        expect(page.page.locator("#prompt")).to_have_value("Kept.")
        page.page.reload()
        expect(page.page.locator("#model-name")).to_have_value("pirate")


def test_without_others_there_is_no_model_to_choose(browser: Browser) -> None:
    with talk(browser, answering("yes")) as page:
        expect(page.page.locator("#model-name")).to_be_hidden()


def test_an_error_is_told_and_the_answer_can_be_asked_for_again(browser: Browser) -> None:
    engine = answering("fine", "fine")
    engine.capacity = 0
    with talk(browser, engine) as page:
        page.expects_failed_requests = True
        page.say("Hello")
        expect(page.page.locator("#turns .error")).to_contain_text("Try again in")
        engine.capacity = 1
        page.page.get_by_role("button", name="Try again").click()
        page.wait_for_answer()
        assert said(page) == ["Hello", "fine"]
        assert page.bodies()[1]["messages"] == [{"role": "user", "content": "Hello"}]


def test_what_the_model_says_never_becomes_the_pages(browser: Browser) -> None:
    """Nor does what the user says: both are text, and links lead to the web only."""
    bad = (
        '<img src=x onerror="window.hurt=1"> <script>window.hurt=1</script>\n'
        "[a](javascript:window.hurt=1) [b](data:text/html,x) ![c](https://example.com/c.png)\n"
        '[d](https://example.com/?q="onmouseover=1) <https://example.com/e>\n'
    )
    with talk(browser, answering(bad)) as page:
        page.say(bad)
        assert page.page.locator("#turns").locator("img, script, iframe, [onerror]").count() == 0
        links = page.page.locator("#turns a").all()
        assert [each.get_attribute("href") for each in links] == [
            "https://example.com/c.png",
            'https://example.com/?q="onmouseover=1',
            "https://example.com/e",
        ]
        assert not [each for each in links if each.get_attribute("onmouseover")]
        assert "javascript:window.hurt=1" in said(page)[1]
        assert page.page.evaluate("window.hurt") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_nothing_is_in_anybodys_way(
    browser: Browser, viewport: dict[str, int], scheme: Any
) -> None:
    table = "\n\n| a | b |\n|---|---|\n| 1 | [web](https://example.com) |\n\n> quoted\n\n#### Deep"
    with talk(
        browser, answering(LIST + table, CALL), viewport=viewport, color_scheme=scheme
    ) as page:
        page.page.locator("#shape > summary").click()
        page.page.get_by_role("button", name="Insert an example of a tool").click()
        page.say("Hello")
        page.say("And the weather?")
        expect(page.page.get_by_label("What get_weather returns")).to_be_visible()
        page.code("Python")
        assert page.barriers() == []
        assert page.page.evaluate("document.documentElement.scrollWidth") == viewport["width"]


def test_the_view_is_in_the_address(browser: Browser) -> None:
    with slipstream(answering("yes")) as url, visit(browser, url) as page:
        page.page.goto(f"{url}/#conversation")
        expect(page.page.locator("#message")).to_be_visible()
        expect(page.page.get_by_role("link", name="Conversation")).to_have_attribute(
            "aria-current", "page"
        )
        # Each view has its numbers.
        page.page.get_by_label("Max tokens").fill("33")
        page.page.get_by_role("link", name="Race").click()
        expect(page.page.get_by_label("Max tokens")).not_to_have_value("33")
        page.page.go_back()
        expect(page.page.get_by_label("Max tokens")).to_have_value("33")
        assert json.loads(page.code("JSON"))["max_tokens"] == 33
