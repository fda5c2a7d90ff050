"""The reference of the API in a real browser: it shows what the server has, and asks nobody else."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from worlds.browser_visit import visit
from worlds.client_servers import slipstream
from worlds.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.slow


def test_the_reference_shows_the_endpoints_and_asks_nobody_else(browser: Browser) -> None:
    # The visit looks for strays and complaints itself.
    with slipstream(ScriptedEngine()) as url, visit(browser, url) as seen:
        seen.page.goto(f"{url}/docs")
        block = seen.page.locator(".opblock", has_text="/v1/chat/completions")
        expect(block).to_be_visible()
        block.locator(".opblock-summary").click()
        expect(block.get_by_text("max_completion_tokens").first).to_be_visible()
