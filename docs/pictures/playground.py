"""Takes the pictures of the playground: ``python docs/pictures/playground.py``.

Starts the server with SmolLM2, runs the page's first example (a greedy edit) in Debian's
Chromium, and writes ``playground-light.png`` and ``playground-dark.png`` beside this file.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

from engine.build import build_engine
from engine.config import EngineConfig
from engine.names import SMOLLM2
from server.app import build_app
from server.settings import Settings

FOLDER = Path(__file__).parent
WIDTH, HEIGHT, MARGIN = 1280, 720, 24
MAX_BYTES = 200_000
HANG = 120.0


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server on the loopback interface."""
    engine, tokenizer = build_engine(EngineConfig(SMOLLM2))
    app = build_app(engine, tokenizer, Settings(drain_seconds=1))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
        thread.start()
        deadline = time.monotonic() + HANG
        while not server.started:
            if time.monotonic() > deadline:
                raise TimeoutError("the server did not start")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join(HANG)


def finished(browser: Browser, url: str) -> Page:
    """The page after a second run: during the first one the engine still measures its steps."""
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.goto(url)
    for _ in range(2):
        page.locator("#run").click()
        page.locator("#output[aria-busy=false]").wait_for()
    verdict = page.locator("#verdict").inner_text()
    if not verdict.startswith("The two texts are equal"):
        raise RuntimeError(verdict)
    # The engine's figures settle a moment later.
    page.locator("#engine-figures dd").first.filter(has_text="0").wait_for()
    page.evaluate("document.activeElement.blur()")
    page.mouse.move(0, 0)
    return page


def take(page: Page, scheme: Literal["light", "dark"]) -> None:
    """From the page's top to below what shows the engine."""
    page.emulate_media(color_scheme=scheme)
    engine = page.locator("#engine").bounding_box()
    assert engine is not None
    height = engine["y"] + engine["height"] + MARGIN
    path = FOLDER / f"playground-{scheme}.png"
    page.screenshot(
        path=path, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height}
    )
    if path.stat().st_size > MAX_BYTES:
        raise RuntimeError(f"{path.name} has {path.stat().st_size} bytes")


def main() -> None:
    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("no chromium here: apt-get install --no-install-recommends chromium")
    with serving() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        page = finished(browser, url)
        take(page, "light")
        take(page, "dark")
        browser.close()


if __name__ == "__main__":
    main()
