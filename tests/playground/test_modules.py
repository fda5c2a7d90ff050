"""The page's own modules, without a browser: in the program that drives one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from playwright._impl._driver import compute_driver_executable

import server

FOLDER = Path(server.__file__).parent / "playground"
# What the modules need of a page.
_PAGE = """
class Made extends EventTarget {
  childNodes = []; style = {}; dataset = {}; textContent = ""; value = "";
  constructor(name = "") { super(); this.tagName = name.toUpperCase(); }
  get lastElementChild() { return this.childNodes.at(-1) ?? null; }
  append(...nodes) { this.childNodes.push(...nodes); }
  replaceChildren(...nodes) { this.childNodes = nodes; }
  querySelector() { return new Made(); }
  replaceWith() {} setAttribute() {} focus() {}
}
const boxes = {};
globalThis.document = {
  hidden: true, getElementById: (id) => (boxes[id] ??= new Made()), addEventListener() {},
  createElement: (name) => new Made(name),
};
const [module, given] = [await import(process.argv[1]), JSON.parse(process.argv[2])];
const tell = (found) => process.stdout.write(JSON.stringify(found));
"""
_FIGURES = """
const panel = new module.EnginePanel();
const shown = {};
panel._show = (name, text) => (shown[name] = text);
panel.model = "mine";
for (const each of given) panel._draw(new Map(Object.entries(each)));
tell(shown);
"""
_DEPTH = """
const depth = (node) => 1 + Math.max(0, ...(node.childNodes ?? []).map(depth));
const text = given.mark.repeat(given.count) + "x";
tell(depth({ childNodes: module.markdown(text, (start, end) => [text.slice(start, end)]) }));
"""
_CLEARED = """
globalThis.sessionStorage = { getItem: () => null, setItem() {} };
globalThis.cancelAnimationFrame = () => {};
globalThis.fetch = (_, { signal }) =>
  new Promise((_, fail) => signal.addEventListener("abort", () => fail(signal.reason)));
const nothing = () => {};
const talk = new module.Conversation(
  { request: (messages) => ({ messages }), changed: nothing, busy: nothing, refused: nothing },
);
talk.enabled = true;
boxes.message.value = given;
talk.send();
boxes.clear.dispatchEvent(new Event("click"));
await new Promise(setTimeout);
tell([talk.running, talk.messages(), boxes.said.textContent]);
"""


def told(name: str, script: str, given: Any) -> Any:
    """Returns what a script with a module of the page tells."""
    node, _ = compute_driver_executable()
    command = [node, "--input-type=module", "-e", f"{_PAGE}{script}"]
    arguments = [(FOLDER / name).as_uri(), json.dumps(given)]
    done = subprocess.run([*command, *arguments], capture_output=True, check=True)
    return json.loads(done.stdout)


def scrape(**figures: float) -> dict[str, float]:
    """Returns figures of two models, with labels in the order of expositions: that of their names."""
    found: dict[str, float] = {}
    for model, factor in (("mine", 1), ("other", 5)):
        for name, value in figures.items():
            own = f'drafter="ngram",model="{model}"' if "gamma" in name else f'model="{model}"'
            found[f"slipstream_{name}{{{own}}}"] = factor * value
    return found


def test_figures_are_of_the_model_that_is_shown() -> None:
    before = scrape(requests_running=3, spec_gamma_count=0, spec_gamma_sum=0)
    after = scrape(requests_running=3, spec_gamma_count=10, spec_gamma_sum=20)
    after['slipstream_spec_gamma_sum{drafter="ngram",model="other"}'] = 400
    shown = told("engine.js", _FIGURES, [before, after])
    assert (shown["running"], shown["gamma"]) == ("3", "2.0")


@pytest.mark.parametrize("mark", [">", "> ", "+ ", "1. "])
def test_no_text_is_nested_too_deeply_for_the_page(mark: str) -> None:
    """A model in a loop may write a mark thousands of times: the page's stack was not deep enough."""
    assert told("markdown.js", _DEPTH, {"mark": mark, "count": 5}) >= 6
    assert told("markdown.js", _DEPTH, {"mark": mark, "count": 6000}) < 60


def test_a_new_conversation_ends_the_answer_and_keeps_nothing_of_it() -> None:
    ended = [False, [], "The conversation is empty."]
    assert told("conversation.js", _CLEARED, "Go on") == ended
