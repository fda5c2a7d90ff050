"""The playground in a real browser, before a real server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Response, expect

from worlds.browser_visit import ENDLESS, PHONE, WIDE, Visit, visit
from worlds.client_servers import wait_for
from worlds.playground_server import HANG, Line, LiveServer, live_server

pytestmark = pytest.mark.slow

KEY = "s3cret-key"
SOME_STEPS = 20
"""That write some text without drafts, and with them, 17 tokens in each at most, less than 1,500."""


@pytest.fixture(scope="module")
def server(browser: Browser) -> Iterator[LiveServer]:  # noqa: ARG001 - without a browser none starts
    with live_server() as made:
        yield made


@pytest.fixture(scope="module")
def line(server: LiveServer) -> Iterator[Line]:
    made = Line(server.port)
    yield made
    made.close()


@pytest.fixture
def page(browser: Browser, line: Line) -> Iterator[Visit]:
    """The playground, loaded, on a wide window."""
    with visit(browser, line.url) as made:
        made.load()
        yield made


def metrics(line: Line) -> dict[str, float]:
    rows = httpx.get(line.url + "/metrics", timeout=HANG).text.splitlines()
    pairs = (row.rpartition(" ") for row in rows if row and not row.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def run_in_two(page: Visit, server: LiveServer) -> list[str]:
    """Returns what the panes show before the rest comes, the drafted one first, once both have ended."""
    page.at_once()
    with server.held():
        page.page.locator("#run").click()
        server.step_both(3)
        for pane in ("drafted", "plain"):
            page.wait_for_text(1, pane)
        shown = [page.text(pane) for pane in ("drafted", "plain")]
    page.wait()
    return shown


# --- the two panes ---


def test_both_panes_stream_the_same_text_and_drafts_are_marked(
    page: Visit, line: Line, server: LiveServer
) -> None:
    """An edit as it comes with the page."""
    first = run_in_two(page, server)
    text = page.text("drafted")
    assert "def load_numbers(path" in text
    assert all(text.startswith(shown) and shown != text for shown in first)
    assert text == page.text("plain")
    drafted, plain = page.bodies()
    assert drafted.pop("speculative") == {"return_drafted": True}
    assert plain.pop("speculative") == {"draft_strategy": "none", "return_drafted": True}
    assert drafted == plain
    marked = page.page.locator("#drafted .text .drafted").all_text_contents()
    assert 0 < len("".join(marked)) < len(text)
    assert page.page.locator("#plain .text .drafted").count() == 0
    # Any other client gets this text as well.
    whole = plain | {"stream": False, "stream_options": None}
    reply = httpx.post(line.url + "/v1/chat/completions", json=whole, timeout=HANG).json()
    assert reply["choices"][0]["message"]["content"] == text
    assert page.verdict().startswith("The two texts are equal, all ")
    assert f"{reply['usage']['completion_tokens']} tokens" in page.verdict()


def test_it_says_in_which_bits_the_model_is_held(page: Visit, line: Line) -> None:
    (card,) = httpx.get(line.url + "/v1/models", timeout=HANG).json()["data"]
    held = card["quantization"]
    share = int(100 * held["num_quantized"] / held["num_parameters"])
    told = (
        f"{held['method']}: {held['bits']:g} bits per weight, {held['activation_bits']} per input"
    )
    told += f" for {share} % of the weights, {card['dtype']} for the others"
    expect(page.page.locator("#model")).to_contain_text(f" · {told} · ")


def test_figures_are_the_servers_account(page: Visit, server: LiveServer) -> None:
    """Gamma, acceptance, tokens per step, of the reply's own usage."""

    def is_first_reply(response: Response) -> bool:
        return [response.request.post_data_json] == page.bodies()[:1]

    with page.page.expect_response(is_first_reply) as told:
        run_in_two(page, server)
    chunks = [each[6:] for each in told.value.text().split("\n") if each.startswith("data: {")]
    usage = json.loads(chunks[-1])["usage"]
    account = usage["speculative"]
    assert account["num_accepted_tokens"] > 0
    assert page.figure("drafted", "Acceptance") == f"{100 * account['acceptance_rate']:.0f} %"
    assert page.figure("drafted", "Steps") == str(account["num_steps"])
    # The token that ends the text is written by a step too.
    per_step = (usage["completion_tokens"] + 1) / account["num_steps"]
    assert float(page.figure("drafted", "Tokens/step")) == pytest.approx(per_step, abs=0.006)
    gamma = re.fullmatch(r"\d+ \((\d+\.\d)\)", page.figure("drafted", "Gamma"))
    assert gamma
    mean = account["num_draft_tokens"] / account["num_steps"]
    assert float(gamma[1]) == pytest.approx(mean, abs=0.06)
    # What drafts are for: fewer steps for the same tokens.
    assert page.figure("drafted", "Tokens/step") > page.figure("plain", "Tokens/step") == "1.00"
    assert int(page.figure("drafted", "Steps")) < int(page.figure("plain", "Steps"))
    # Requests that share steps have no speed to be compared.
    assert page.figure("drafted", "Speed-up") == "–"
    steps = [page.figure(pane, "Steps") for pane in ("drafted", "plain")]
    assert page.verdict().endswith(
        f"With drafts it took {steps[0]} steps, without them {steps[1]}."
    )
    # One bar per chunk with steps in it, the last 48 of them: how many there are is the drafter's choice.
    choices = [choice for chunk in chunks[:-1] for choice in json.loads(chunk)["choices"]]
    num_chunks = sum(1 for choice in choices if choice.get("num_steps"))
    assert 0 < num_chunks <= account["num_steps"]
    assert page.page.locator("#drafted rect.granted").count() == min(num_chunks, 48)


def test_there_is_one_speed_up_of_requests_that_had_the_engine_to_themselves(
    page: Visit, server: LiveServer
) -> None:
    page.ask(ENDLESS, 40)
    with server.held():
        page.page.locator("#run").click()
        for pane in ("plain", "drafted"):
            server.step_one(1)
            page.wait_for_text(1, pane)
            # What is too short is not timed.
            time.sleep(0.05)
            server.step_one(39)
            expect(page.page.locator(f"#{pane} .status")).to_have_text("done: max tokens")
        page.wait()
    rates = [float(page.figure(pane, "Tokens/s")) for pane in ("drafted", "plain")]
    shown = page.figure("drafted", "Speed-up")
    assert float(shown[:-1]) == pytest.approx(rates[0] / rates[1], rel=0.15, abs=0.1)
    assert page.verdict().endswith(f": {shown} as fast.")
    everywhere = re.findall(r"[\d.]+×", page.page.locator("main").inner_text())
    assert len(everywhere) > 1
    assert set(everywhere) == {shown}
    assert page.figure("plain", "Speed-up") == "–"


def test_sampled_texts_are_equal_for_the_seed_they_share(page: Visit) -> None:
    page.ask("def add(a, b):\n", 48, temperature=0.7)
    page.page.locator("#seed").fill("")
    page.run()
    first = page.text("drafted")
    assert first
    assert first == page.text("plain")
    drafted, plain = page.bodies()
    # An empty field has been filled by the page, for both.
    assert page.page.locator("#seed").input_value() == str(drafted["seed"]) == str(plain["seed"])
    page.page.locator("#seed").fill("8")
    page.run()
    assert page.text("drafted") == page.text("plain") != first


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_nothing_moves(browser: Browser, line: Line, viewport: dict[str, int]) -> None:
    """Neither while the page loads nor while it streams, texts longer than their box included."""
    with visit(browser, line.url, viewport=viewport) as page:
        page.load()
        assert page.shifts() < 0.01
        page.ask(ENDLESS, 140)
        page.page.evaluate("window.shifts.length = 0")
        page.run()
        # Words of the verdict change their places; no box does.
        assert page.shifts() < 0.02
        box = page.page.locator("#plain .text")
        assert box.evaluate("box => box.scrollHeight > box.clientHeight")
        assert box.evaluate("box => box.scrollTop + box.clientHeight >= box.scrollHeight - 2")


# --- what goes wrong ---


def test_a_refusal_is_told_in_words_beside_its_field(page: Visit) -> None:
    page.expects_failed_requests = True
    page.at_once()
    page.ask("x", 8, temperature=9)
    page.run()
    for pane in ("drafted", "plain"):
        assert "temperature" in page.page.locator(f"#{pane} .error").inner_text()
    assert page.verdict().startswith("Both requests failed: ")
    field = page.page.locator("#temperature")
    expect(field).to_have_attribute("aria-invalid", "true")
    beside = page.page.locator(f"#{field.get_attribute('aria-errormessage')}")
    expect(beside).to_contain_text("temperature")
    # An option that only the drafted request has: only that pane fails.
    field.fill("0")
    page.set_speculation("draft_strategy", "nasd")
    page.set_speculation("options.n", "99")
    page.run()
    expect(field).not_to_have_attribute("aria-invalid", "true")
    expect(page.page.locator('[data-name="options.n"]')).to_have_attribute("aria-invalid", "true")
    assert page.page.locator("#drafted .error").inner_text().startswith("speculative.options.n")
    assert page.verdict().startswith("The request with drafts failed: speculative.options.n")
    expect(page.page.locator("#plain .status")).to_have_text("done: max tokens")
    page.set_speculation("options.n", "3")
    page.run()
    expect(page.page.locator("#drafted .error")).to_be_hidden()
    assert page.text("plain") == page.text("drafted") != ""


def test_a_lost_connection_is_told_and_can_come_back(
    page: Visit, line: Line, server: LiveServer
) -> None:
    page.expects_failed_requests = True
    page.ask(ENDLESS, 1500)
    page.at_once()
    with server.held():
        page.page.locator("#run").click()
        server.step_both(SOME_STEPS)
        page.wait_for_text(20)
        line.cut()
        page.wait()
    try:
        for pane in ("drafted", "plain"):
            told = page.page.locator(f"#{pane} .error")
            expect(told).to_have_text(
                "The connection to the server was lost. The text is not complete."
            )
            expect(page.page.locator(f"#{pane} .status")).to_have_text("broke off")
        assert "The connection to the server was lost." in page.verdict()
        expect(page.page.locator("#engine-state")).to_contain_text("cannot be reached")
        page.run()
        told = page.page.locator("#plain .error")
        expect(told).to_have_text("The server cannot be reached. Is it running?")
    finally:
        line.mend()
    page.ask("x = 1\n", 8)
    page.run()
    assert page.verdict().startswith("The two texts are equal")
    expect(page.page.locator("#engine-state")).to_have_text("idle")


def test_the_key_is_asked_for_and_kept_for_the_session_only(browser: Browser) -> None:
    with live_server(api_key=KEY) as own, visit(browser, f"http://127.0.0.1:{own.port}") as page:
        page.expects_failed_requests = True
        page.page.goto(page.url)
        field = page.page.get_by_label("This server wants an API key")
        expect(field).to_be_focused()
        for wrong in ("guess", "ключ"):
            field.fill(wrong)
            field.press("Enter")
            expect(page.page.locator("#key-error")).to_have_text(
                "The server does not take this key."
            )
        field.fill(KEY)
        field.press("Enter")
        expect(page.page.locator("#main")).to_be_visible()
        expect(page.page.locator("#key-form")).to_be_hidden()
        page.ask("x = 1\n", 8)
        page.run()
        assert page.verdict().startswith("The two texts are equal")
        assert page.page.evaluate("localStorage.length + document.cookie.length") == 0
        assert not [each.url for each in page.requests if KEY in each.url]
        page.load()
        with visit(browser, page.url) as other:
            other.expects_failed_requests = True
            other.page.goto(other.url)
            expect(other.page.locator("#key-form")).to_be_visible()


# --- the speculative object ---


def test_every_drafter_offers_the_options_it_reports(page: Visit, line: Line) -> None:
    drafters = httpx.get(line.url + "/v1/drafters", timeout=HANG).json()["data"]
    assert len(drafters) > 10
    offered = page.page.locator('[data-name="draft_strategy"] option')
    assert [each.get_attribute("value") for each in offered.all()] == [d["id"] for d in drafters]
    colours = set()
    for drafter in drafters:
        page.set_speculation("draft_strategy", drafter["id"])
        names = page.page.evaluate(
            "[...document.querySelectorAll('#speculative [data-name]')].map(f => f.dataset.name)"
        )
        options = {name[8:] for name in names if name.startswith("options.")}
        assert options == {option["name"] for option in drafter["options"]}, drafter["id"]
        assert ("tree_strategy" in names) == drafter["drafts_trees"]
        assert ("verification" in names) == drafter["draws"]
        assert ("prediction" in names) == drafter["takes_prediction"]
        for option in drafter["options"]:
            shown = page.page.locator(f'[data-name="options.{option["name"]}"]')
            if isinstance(option["default"], bool):
                assert shown.is_checked() == option["default"]
            elif option["default"] is not None:
                assert shown.input_value() == str(option["default"])
        colours.add(page.page.evaluate("getComputedStyle(document.body).getPropertyValue('--hue')"))
    assert len(colours) == len(drafters)


def test_what_is_entered_is_what_is_shown_and_sent(page: Visit) -> None:
    """Defaults are left out, and so are fields that a later choice has removed."""
    page.ask("x = 1\n" * 8, 16)
    page.at_once()
    for name, value in (
        ("draft_strategy", "nasd"),
        ("tree_strategy", "tree"),
        ("tree_width", "3"),
        ("options.n", "3"),
        ("adaptive_depth", "target_rate"),
        ("max_speculative_tokens", "5"),
        ("adaptive_depth", "fixed"),
        ("num_speculative_tokens", "6"),
    ):
        page.set_speculation(name, value)
    page.page.locator('[data-name="options.stop_if_unknown"]').uncheck()
    shown = json.loads(page.code("JSON"))["speculative"]
    assert shown == {
        "draft_strategy": "nasd",
        "adaptive_depth": "fixed",
        "num_speculative_tokens": 6,
        "tree_strategy": "tree",
        "tree_width": 3,
        "options": {"n": 3, "stop_if_unknown": False},
        "return_drafted": True,
    }
    page.run()
    assert page.bodies()[0]["speculative"] == shown
    assert page.verdict().startswith("The two texts are equal")
    expect(page.page.locator("#drafted h2")).to_have_text("With drafts by nasd")
    page.page.get_by_role("button", name="Back to the server's defaults").click()
    assert json.loads(page.code("JSON"))["speculative"] == {"return_drafted": True}
    # A prediction goes with the drafter that takes it.
    page.set_speculation("draft_strategy", "prediction")
    page.set_speculation("prediction", "def load_numbers(path, separator")
    page.run()
    drafted, plain = page.bodies()[2:]
    expected = {"type": "content", "content": "def load_numbers(path, separator"}
    assert (drafted["prediction"], plain.get("prediction")) == (expected, None)
    assert page.verdict().startswith("The two texts are equal")


# --- the engine ---


def test_the_engine_is_shown_as_its_metrics_tell(
    page: Visit, line: Line, server: LiveServer
) -> None:
    page.ask(ENDLESS, 1500)
    page.at_once()
    # Small until something runs.
    expect(page.page.locator("#engine-figures")).to_be_hidden()
    expect(page.page.locator("#engine-state")).to_have_text("idle")
    blocks = page.page.locator("#kv-states li")
    with server.held():
        page.page.locator("#run").click()
        server.step_both(SOME_STEPS)
        expect(page.page.locator("#engine-state")).to_have_text("2 running, 0 waiting")
        expected = {"In the batch": "2", "In the queue": "0"}
        for label, value in expected.items():
            row = page.page.locator("#engine-figures > div", has_text=label)
            expect(row.locator("dd")).to_have_text(value)
        expect(blocks.filter(has_text="committed").locator("b")).not_to_have_text("0")
        page.page.keyboard.press("Escape")
        page.wait()
    wait_for(lambda: metrics(line)["slipstream_requests_running"] == 0)
    for state in ("committed", "draft", "cached", "free"):
        count = int(metrics(line)[f'slipstream_kv_blocks{{state="{state}"}}'])
        expect(blocks.filter(has_text=state).locator("b")).to_have_text(str(count))


# --- hands and eyes ---


def test_the_page_works_from_the_keyboard(page: Visit, server: LiveServer) -> None:
    """Tab reaches all there is, focus shows, and the requests run and stop without a mouse."""
    keyboard = page.page.keyboard
    # What Tab should reach: of each group of radio buttons the chosen one.
    wanted = page.page.evaluate(
        """() => {
          const all = "a[href], button, select, textarea, input, summary, [tabindex='0']";
          const fits = (each) =>
            each.checkVisibility() && !each.disabled && (each.type !== "radio" || each.checked);
          return [...document.querySelectorAll(all)].filter(fits).map((each, at) => {
            each.dataset.stop = at;
            return String(at);
          });
        }"""
    )
    assert len(wanted) > 15
    reached: list[str] = []
    for _ in wanted:
        keyboard.press("Tab")
        stop, outline = page.page.evaluate(
            """() => {
              const style = getComputedStyle(document.activeElement);
              return [document.activeElement.dataset.stop, style.outlineStyle];
            }"""
        )
        reached.append(stop)
        assert outline != "none", stop
    assert reached == wanted
    page.page.locator(".skip").focus()
    keyboard.press("Enter")
    expect(page.page.locator("#show")).to_be_focused()
    page.page.locator('[data-name="draft_strategy"]').focus()
    keyboard.type("suffix")
    expect(page.page.locator("#speculation-summary")).to_contain_text("suffix")
    # A choice rebuilds its form and keeps the focus.
    expect(page.page.locator('[data-name="draft_strategy"]')).to_be_focused()
    page.ask(ENDLESS, 1500)
    page.at_once()
    page.page.locator("#run").focus()
    with server.held():
        keyboard.press("Enter")
        expect(page.page.locator("#stop")).to_be_focused()
        server.step_both(SOME_STEPS)
        page.wait_for_text(20)
        keyboard.press("Enter")
        page.wait()
    assert page.verdict() == "Stopped. The texts are equal as far as both go."
    expect(page.page.locator("#run")).to_be_focused()
    page.page.locator("#prompt").focus()
    with server.held():
        keyboard.press("Control+Enter")
        server.step_both(SOME_STEPS)
        page.wait_for_text(20)
        keyboard.press("Escape")
        page.wait()
    expect(page.page.locator("#plain .status")).to_have_text("stopped")


def test_a_phone_sees_all_of_it(browser: Browser, line: Line) -> None:
    with visit(browser, line.url, viewport=PHONE, has_touch=True) as page:
        page.load()
        page.page.locator("#run").tap()
        page.wait()
        expect(page.page.locator("#verdict")).to_be_in_viewport()
        expect(page.page.locator("#drafted .text")).to_be_in_viewport()
        page.page.locator("#speculation > summary").tap()
        assert page.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        # Below 16 pixels phones zoom into what is tapped.
        sizes = page.page.evaluate(
            "[...document.querySelectorAll('input:not([type=radio], [type=checkbox]), select, textarea')]"
            ".map(field => parseFloat(getComputedStyle(field).fontSize))"
        )
        assert min(sizes) >= 16


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read_in_every_drafters_hue(
    browser: Browser, line: Line, scheme: Any
) -> None:
    """Contrast of 4.5 and more, as WCAG 2 asks of text at level AA."""
    with visit(browser, line.url, color_scheme=scheme) as page:
        page.load()
        pairs = [
            ("--ink", "--draft-back"),
            ("--draft-ink", "--surface"),
            ("--ink", "--page"),
            ("--muted", "--page"),
            ("--muted", "--surface"),
            ("--ink", "--sunken"),
            ("--on-accent", "--accent"),
            ("--error", "--error-back"),
            ("--error", "--page"),
            ("--accent", "--page"),
            ("--accent", "--surface"),
        ]
        for index in range(page.page.locator('[data-name="draft_strategy"] option').count()):
            page.page.locator('[data-name="draft_strategy"]').select_option(index=index)
            contrasts = page.page.evaluate(_CONTRASTS, pairs)
            assert {tuple(p): c for p, c in zip(pairs, contrasts, strict=True) if c < 4.5} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_nothing_is_in_anybodys_way(
    browser: Browser, line: Line, viewport: dict[str, int], scheme: Any
) -> None:
    with visit(browser, line.url, viewport=viewport, color_scheme=scheme) as page:
        page.load()
        page.run()
        page.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert page.barriers() == []


_CONTRASTS = """(pairs) => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const probe = document.querySelector("[data-legend]");
  const luminance = (name) => {
    probe.style.setProperty("color", `var(${name})`);
    context.fillStyle = getComputedStyle(probe).color;
    probe.style.removeProperty("color");
    context.fillRect(0, 0, 1, 1);
    const parts = [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)].map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  return pairs.map((pair) => {
    const [low, high] = pair.map(luminance).sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  });
}"""
