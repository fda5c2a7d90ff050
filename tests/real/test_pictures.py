"""The documentation's pictures of the playground, taken as a visitor sees it.

``WRITE_PICTURES=1 scripts/test tests/real/test_pictures.py`` writes them to docs/pictures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, expect

from worlds.browser_visit import Visit, visit
from worlds.deploy_tools import ROOT
from worlds.real_model import REAL
from worlds.served_command import Server

pytestmark = REAL

WIDTH, HEIGHT, MARGIN = 1280, 720, 24
MAX_BYTES = 250_000
TIPS = "Give me three tips for a good night's sleep."
FUNCTION = "Write a Python function that checks whether a word is a palindrome, with a docstring."


@pytest.fixture
def page(browser: Browser, smollm2: Server) -> Iterator[Visit]:
    with visit(browser, smollm2.url, viewport={"width": WIDTH, "height": HEIGHT}) as made:
        made.load()
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return ROOT / "docs" / "pictures" if os.environ.get("WRITE_PICTURES") else tmp_path


def take(page: Visit, folder: Path, name: str) -> None:
    """In both schemes, from the page's top to below what shows the engine."""
    # Its figures settle a moment later.
    expect(page.page.locator("#engine-state")).to_have_text("idle")
    page.page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    page.page.mouse.move(0, 0)
    engine = page.page.locator("#engine").bounding_box()
    assert engine is not None
    height = engine["y"] + engine["height"] + MARGIN
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        page.page.emulate_media(color_scheme=scheme)
        path = folder / f"{name}-{scheme}.png"
        clip = {"x": 0.0, "y": 0.0, "width": float(WIDTH), "height": height}
        page.page.screenshot(path=path, full_page=True, clip=clip)
        assert path.stat().st_size < MAX_BYTES


def test_the_race(page: Visit, folder: Path) -> None:
    """The second of two: during the first one the engine still measures its steps."""
    page.run()
    page.run()
    assert page.verdict().startswith("The two texts are equal")
    assert page.verdict().endswith("as fast.")
    take(page, folder, "playground")


def test_the_conversation(page: Visit, folder: Path) -> None:
    page.page.set_viewport_size({"width": WIDTH, "height": 1000})
    page.converse()
    page.page.get_by_label("Temperature").fill("0")
    page.say(TIPS)
    page.say(FUNCTION)
    # Once more: drafters that look up texts have seen it.
    page.page.get_by_role("button", name="Regenerate").click()
    page.wait_for_answer()
    answers = page.page.locator("#turns .assistant .said")
    expect(answers.first.locator("ol > li")).to_have_count(3)
    expect(answers.last.locator("pre").first).to_contain_text("def is_palindrome(word)")
    assert answers.last.locator(".drafted").count() > 0
    take(page, folder, "conversation")
