"""A visit to the playground in Chromium, and what happened behind the visitor's back."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

# The browser's own services call home; without a GPU it need not look for one. Tests run as root
# in containers, where the sandbox cannot be set up.
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
# Milliseconds: other work may want the same cores.
_PATIENCE = 120_000
# Greedily, the bundled model goes on with this for as long as it may.
ENDLESS = "x = 0\n" * 30
_SHIFTS = """
window.shifts = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.shifts.push(entry.value);
}).observe({ type: "layout-shift", buffered: true });
"""


@contextmanager
def opened_browser() -> Iterator[Browser]:
    """Debian's Chromium; without it the test is skipped."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium here: apt-get install --no-install-recommends chromium")
    expect.set_options(timeout=_PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=_FLAGS)
        yield browser
        browser.close()


class Visit:
    """``page`` is the browser's; the lists fill by themselves."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.requests: list[Request] = []
        self.complaints: list[str] = []
        self.expects_failed_requests = False
        page.on("request", lambda request: self.requests.append(request))
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _hear(self, message: ConsoleMessage) -> None:
        # The browser itself logs every answer of 400 and more, and every broken connection.
        if self.expects_failed_requests and message.text.startswith("Failed to load resource"):
            return
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def load(self) -> None:
        self.page.goto(self.url + "/")
        expect(self.page.locator("#main")).to_be_visible()

    def ask(self, prompt: str, max_tokens: int, temperature: float = 0) -> None:
        """Fill the form for a completion."""
        page = self.page
        page.get_by_label("Completion", exact=True).check()
        page.locator("#prompt").fill(prompt)
        page.locator("#max-tokens").fill(str(max_tokens))
        page.locator("#temperature").fill(str(temperature))

    def at_once(self) -> None:
        """The two requests of a race run together from now on."""
        self.page.get_by_label("At once").check()

    def code(self, language: str) -> str:
        """The request as the page writes it in this language."""
        if not self.page.locator("#code").evaluate("details => details.open"):
            self.page.locator("#code > summary").click()
        self.page.locator("#language").select_option(language)
        return self.page.locator("#snippet").inner_text()

    def converse(self) -> None:
        """From the race to the conversation."""
        self.page.get_by_role("link", name="Conversation").click()
        expect(self.page.locator("#talk")).to_be_visible()

    def say(self, text: str) -> None:
        """Returns when it is answered."""
        self.page.locator("#message").fill(text)
        self.page.locator("#message").press("Enter")
        self.wait_for_answer()

    def wait_for_answer(self) -> None:
        expect(self.page.locator("#log")).to_have_attribute("aria-busy", "false")

    def set_speculation(self, name: str, value: str) -> None:
        """Sets a field of the speculative object, ``options.n`` say."""
        field = self.page.locator(f'[data-name="{name}"]')
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)

    def run(self) -> None:
        """Returns when both panes have ended."""
        self.page.locator("#run").click()
        self.wait()

    def wait(self) -> None:
        expect(self.page.locator("#output")).to_have_attribute("aria-busy", "false")

    def wait_for_text(self, num_characters: int, pane: str = "plain") -> None:
        """Returns when the pane shows some."""
        shown = re.compile(rf"[\s\S]{{{num_characters}}}")
        expect(self.page.locator(f"#{pane} .text")).to_have_text(shown)

    def text(self, pane: str) -> str:
        return self.page.locator(f"#{pane} .text").text_content() or ""

    def figure(self, pane: str, label: str) -> str:
        term = self.page.get_by_text(label, exact=True)
        return self.page.locator(f"#{pane} .figures > div", has=term).locator("dd").inner_text()

    def verdict(self) -> str:
        return self.page.locator("#verdict").inner_text()

    def barriers(self) -> list[str]:
        """Returns the barriers that axe finds: rules, and where they are broken."""
        found = Axe().run(self.page).response["violations"]
        return [f"{each['id']}: {node['target']}" for each in found for node in each["nodes"]]

    def shifts(self) -> float:
        """Layout shifts so far: shares of the window, times how far they moved in it."""
        two_frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.page.evaluate(f"{two_frames}.then(() => new Promise(done => setTimeout(done)))")
        total: float = self.page.evaluate("window.shifts.reduce((sum, each) => sum + each, 0)")
        return total

    def bodies(self) -> list[dict[str, Any]]:
        """Returns the bodies that were posted, the drafted request of each run first."""
        return [each.post_data_json for each in self.requests if each.method == "POST"]


@contextmanager
def visit(browser: Browser, url: str, **context: Any) -> Iterator[Visit]:
    """Ends with a look at what no visit may do: leave the origin, or fail in the console."""
    opened = browser.new_context(**({"viewport": WIDE} | context))
    opened.set_default_timeout(_PATIENCE)
    opened.add_init_script(_SHIFTS)
    try:
        made = Visit(opened.new_page(), url)
        yield made
        strays = {each.url for each in made.requests if not each.url.startswith(url + "/")}
        assert strays == set()
        assert made.complaints == []
    finally:
        opened.close()
