"""The playground's Markdown, as the page's module renders it in a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playwright.sync_api import Browser, Page

from worlds.client_servers import slipstream
from worlds.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.slow

_LOAD = """async () => {
  const { markdown } = await import(new URL("playground/markdown.js", location).href);
  window.rendered = (text) => {
    const box = document.createElement("div");
    box.append(...markdown(text, (start, end) => [text.slice(start, end)]));
    return box.innerHTML;
  };
}"""


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """Has a function ``rendered`` from text to HTML."""
    with slipstream(ScriptedEngine()) as url:
        made = browser.new_page()
        made.goto(url)
        made.evaluate(_LOAD)
        yield made


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("# A\n## B ##\n#### C", "<h3>A</h3><h4>B</h4><h5>C</h5>"),
        ("#### deep first", "<h3>deep first</h3>"),
        ("a **b *c* d** e", "<p>a <strong>b <em>c</em> d</strong> e</p>"),
        ("2 * 3 * 4 and a_b_c and ~~no~~", "<p>2 * 3 * 4 and a_b_c and <del>no</del></p>"),
        ("def __init__(self):\n    pass", "<p>def __init__(self):<br>    pass</p>"),
        ("`a*b*` ``x`y``", "<p><code>a*b*</code> <code>x`y</code></p>"),
        (r"\*plain\*", "<p><span>*</span>plain<span>*</span></p>"),
        ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
        ("3. a\n4. b\n\n5. c", '<ol start="3"><li>a</li><li>b</li><li>c</li></ol>'),
        ("- a\n\n  more\n- b", "<ul><li>a<p>more</p></li><li>b</li></ul>"),
        ("1. a\n   ```sh\n   ls\n   ```", '<ol start="1"><li>a<pre data-language="sh">…'),
        ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
        ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
        (
            "```py\n<b>&amp;\n\n# no\n",
            '<pre data-language="py"><code>&lt;b&gt;&amp;amp;\n\n# no\n…',
        ),
        ("<b>no</b> &lt;", "<p>&lt;b&gt;no&lt;/b&gt; &amp;lt;</p>"),
        (
            "| a | b |\n|---|:-:|\n| 1 | `x` |",
            "<table><thead><tr><th>a</th><th>b</th></tr></thead>…",
        ),
        ("| no table |", "<p>| no table |</p>"),
    ],
)
def test_markdown_becomes_elements(page: Page, text: str, html: str) -> None:
    """``…``: and so on."""
    found = page.evaluate("t => rendered(t)", text)
    found = found.replace(' tabindex="0"', "").removeprefix(
        '<div class="table" role="group" aria-label="Table">'
    )
    assert found.startswith(html[:-1]) if html.endswith("…") else found == html


@pytest.mark.parametrize(
    "link", ["javascript:x", "data:text/html,x", "vbscript:x", "/admin", "//x"]
)
def test_links_lead_to_the_web_only(page: Page, link: str) -> None:
    assert page.evaluate("t => rendered(t)", f"[a]({link})") == f"<p>[a]({link})</p>"


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.text(st.sampled_from("ab \n*_`~#>-+1.|[]()!\\<&\"'https://x")))
def test_no_text_is_lost_or_becomes_an_element(page: Page, text: str) -> None:
    """Letters come out in their order, once; only the renderer's own elements are made."""
    letters, names = page.evaluate(
        """text => {
          const box = document.createElement("div");
          box.innerHTML = rendered(text);
          const names = [...box.querySelectorAll("*")].map(each => each.localName);
          return [box.textContent.replace(/[^ab]/g, ""), [...new Set(names)]];
        }""",
        text,
    )
    allowed = "p h3 h4 h5 h6 ul ol li blockquote pre code strong em del a br hr span div"
    allowed += " table thead tbody tr th td"
    assert set(names) <= set(allowed.split())
    kept = "".join(each for each in text if each in "ab")
    is_plain = not any(each in text for each in "[`~|")
    assert letters == kept if is_plain else len(letters) <= len(kept)


@pytest.mark.parametrize(
    "text", ["*" * 20_000, "**a" * 7_000, "[" * 20_000, "`a" * 10_000, "> " * 500]
)
def test_odd_texts_end(page: Page, text: str) -> None:
    assert page.evaluate("t => rendered(t).length", text) > 0
