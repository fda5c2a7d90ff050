"""The playground's request as code: what it says runs, and asks what the page asks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from playwright.sync_api import Browser

from worlds.browser_visit import Visit, visit
from worlds.client_servers import slipstream
from worlds.scripted_engine import ScriptedEngine, engine_info

pytestmark = pytest.mark.slow

KEY = "s3cret-key"
PROMPT = 'It\'s "quoted" $HOME `ls` \\n\n\tünï 🙂 </script>'


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine("hello", info=engine_info(max_model_len=4096))


def run(*command: str, text: str = "") -> str:
    environment = os.environ | {"API_KEY": KEY}
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


def by_curl(code: str, _: Visit) -> str:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    choice = json.loads(run("sh", "-s", text=code))["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def by_python(code: str, _: Visit) -> str:
    return run(sys.executable, "-", text=code).removesuffix("\n")


def by_javascript(code: str, page: Visit) -> str:
    """In the page itself: what runs in Node runs there, but for the environment."""
    program = f"""async () => {{
      let shown;
      const process = {{ env: {{ API_KEY: "{KEY}" }} }};
      const console = {{ log: (text) => (shown = text) }};
      {code}
      return shown;
    }}"""
    shown: str = page.page.evaluate(program)
    return shown


@pytest.mark.parametrize("api_key", [None, KEY], ids=["open", "with a key"])
def test_code_in_every_language_asks_what_the_page_asks(
    browser: Browser, engine: ScriptedEngine, api_key: str | None
) -> None:
    with slipstream(engine, api_key=api_key) as url, visit(browser, url) as page:
        page.expects_failed_requests = True
        page.page.goto(url)
        if api_key:
            page.page.get_by_label("This server wants an API key").fill(api_key)
            page.page.keyboard.press("Enter")
        page.page.locator("#main").wait_for()
        for kind in ("Chat", "Completion"):
            page.ask(PROMPT, 40)
            page.page.get_by_label(kind, exact=True).check()
            page.set_speculation("draft_strategy", "nasd")
            page.set_speculation("options.decay", "0.25")
            page.run()
            asked = engine.requests[-1]
            for language, way in RUNS.items():
                code = page.code(language)
                assert KEY not in code
                assert ("API_KEY" in code) == bool(api_key)
                assert way(code, page) == page.text("plain") == "hello"
                again = engine.requests[-1]
                assert again.prompt_token_ids == asked.prompt_token_ids
                assert (again.sampling.seed, again.sampling.max_tokens) == (7, 40)
                assert again.speculative.draft_strategy == "nasd"
                assert again.speculative.options["decay"] == 0.25


RUNS = {"curl": by_curl, "Python": by_python, "JavaScript": by_javascript}


def test_the_code_follows_what_is_entered(browser: Browser, engine: ScriptedEngine) -> None:
    with slipstream(engine) as url, visit(browser, url, permissions=["clipboard-read"]) as page:
        page.load()
        page.ask("one", 5)
        assert json.loads(page.code("JSON"))["prompt"] == "one"
        page.ask("two", 5)
        assert json.loads(page.code("JSON"))["prompt"] == "two"
        page.page.locator("#code").get_by_role("button", name="Copy").click()
        copied = page.page.evaluate("navigator.clipboard.readText()")
        assert json.loads(copied) == json.loads(page.code("JSON"))
        page.converse()
        page.page.locator("#message").fill("three")
        assert json.loads(page.code("JSON"))["messages"][-1]["content"] == "three"
