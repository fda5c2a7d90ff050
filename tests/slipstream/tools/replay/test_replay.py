"""``slipstream replay``: exact figures where they can be told in advance, and clear refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from drafters.base import DrafterInfo, DrafterNeeds, DrafterUnavailableError
from drafters.registry import NoneDrafter
from drafters.tree import DraftTree
from slipstream.tools.replay import replay as replay_module
from slipstream.tools.replay import report
from slipstream.tools.replay.cost import DEFAULT_STEP_COST, StepCost
from slipstream.tools.replay.log import LogError, LogLine, read_log
from slipstream.tools.replay.replay import (
    ReplayCase,
    ReplayResult,
    accepted_path,
    build_replayable,
    replay,
)
from slipstream.tools.simulate.profile import Kind
from slipstream.tools.simulate.trace import read_trace
from worlds.commands import Run

ROOT = Path(__file__).resolve().parents[4]
FLAT = StepCost([(1, 1.0), (65, 1.0)])
PERIODIC = LogLine(1, [1, 2, 3, 1, 2, 3], [1, 2, 3] * 8)  # 24 tokens to write


def no_time() -> float:
    return 0.0


def played(case: ReplayCase, *lines: LogLine, cost: StepCost = FLAT) -> ReplayResult:
    return replay(case, lines, cost, clock=no_time)


def write_log(folder: Path, *lines: object) -> Path:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def no_tokenizer() -> Any:
    raise AssertionError("token ids need no tokenizer")


class Letters:
    """A token per character; a chat is its contents between colons."""

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        del verbose
        return [0] * add_special_tokens + [ord(letter) for letter in text]

    def apply_chat_template(self, conversation: Any, **how: bool) -> str:
        assert how == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"{each['content']}:" for each in conversation)


# --- the loop ---


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "nasd"])
@pytest.mark.parametrize("width", [1, 4])
def test_periodic_text_takes_every_draft(drafter: str, width: int) -> None:
    result = played(ReplayCase(drafter, width, 3), PERIODIC)
    assert (result.num_steps, result.num_tokens, result.tokens_per_step) == (6, 24, 4.0)
    assert (result.acceptance_rate, result.wasted_rows_per_step) == (1.0, 0.0)
    # Rows cost nothing here and drafting takes no time: as much faster as steps are fewer.
    assert result.estimated_speedup == pytest.approx(4.0)


def test_plain_decoding_is_the_measure() -> None:
    result = played(ReplayCase("none", 1, 8), PERIODIC)
    assert (result.tokens_per_step, result.acceptance_rate) == (1.0, None)
    assert result.estimated_speedup == pytest.approx(1.0)


def test_rows_cost_what_the_table_says() -> None:
    cost = StepCost([(1, 1.0), (4, 2.0)])
    result = played(ReplayCase("ngram", 1, 3), PERIODIC, cost=cost)
    assert result.estimated_speedup == pytest.approx(24 * 1.0 / (6 * 2.0))


def test_drafting_time_counts() -> None:
    times = iter(range(1_000))
    result = replay(ReplayCase("ngram", 1, 3), [PERIODIC], FLAT, clock=lambda: 0.25 * next(times))
    # Every reading of the clock is a quarter second later: open 0.25, propose and observe 0.5.
    assert result.open_seconds == [0.25]
    assert result.draft_seconds == [0.5] * 6
    assert result.median_draft_seconds == result.mean_draft_seconds == 0.5
    assert result.estimated_speedup == pytest.approx(24 / (6 * 1.5))


def test_drafts_that_fail_are_counted_as_waste() -> None:
    # After [1, 2] comes 3 in the prompt; the text goes on otherwise each time.
    line = LogLine(1, [1, 2, 3, 4, 1, 2], [9, 1, 2, 8])
    result = played(ReplayCase("ngram", 1, 2), line)
    # Steps: [3 4] refused, 9; nothing, 1; [.] 2 alone is no match; [9 or 3] refused, 8.
    assert (result.num_steps, result.num_tokens) == (4, 4)
    assert (result.num_draft_tokens, result.num_accepted_tokens) == (2, 0)
    assert result.wasted_rows_per_step == 0.5


def test_no_more_is_drafted_than_can_count() -> None:
    result = played(ReplayCase("ngram", 1, 64), LogLine(1, [1, 2, 3, 1, 2, 3], [1, 2, 3]))
    assert (result.num_steps, result.num_draft_tokens, result.num_accepted_tokens) == (1, 2, 2)


def test_the_accepted_path_follows_the_text_through_a_tree() -> None:
    tree = DraftTree([5, 6, 7, 8], [-1, 0, -1, 2], [0] * 4)
    assert accepted_path(tree, [1, 7, 8, 9], 1) == [0, 3, 4]
    assert accepted_path(tree, [1, 7, 8], 1) == [0, 3]  # the last token is the target's own
    assert accepted_path(tree, [1, 4, 8], 1) == [0]


def test_later_requests_gain_from_earlier_ones_of_their_tenant() -> None:
    text = list(range(50, 90))
    first, again = LogLine(1, [1, 2, 50], text[1:], "a"), LogLine(2, [3, 4, 50], text[1:], "a")
    other = LogLine(2, [3, 4, 50], text[1:], "b")
    case = ReplayCase("suffix", 1, 38)
    alone = played(case, first).num_steps
    assert played(case, first, again).num_steps == alone + 1
    assert played(case, first, other).num_steps == 2 * alone
    isolated = replay(case, [first, again], FLAT, isolate=True, clock=no_time)
    assert isolated.num_steps == 2 * alone


def test_drafters_that_want_top_tokens_get_what_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Curious(NoneDrafter):
        def propose(self, requests: Any) -> list[DraftTree]:
            return [DraftTree([1, 9], [-1, -1], [0, 0]) for _ in requests]

        def num_top_tokens(self, request_id: str) -> int:
            del request_id
            return 4

        def observe(self, observations: Any) -> None:
            seen.extend(observations)

    seen: list[Any] = []
    monkeypatch.setattr(replay_module, "build_drafters", lambda names, *_: {names[0]: Curious()})
    played(ReplayCase("curious", 2, 2), LogLine(1, [3], [1, 2, 4]))
    (first, second) = seen
    assert (first.path, second.path) == ([0, 1], [0])
    assert (first.emitted_token_ids, first.row_token_ids) == ([1, 2], [3, 1, 9])
    assert first.top_token_ids == [[1], [2], []]
    assert first.top_probs == [[1.0], [1.0], []]


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (DrafterNeeds(hidden_rows=True), "hidden states"),
        (DrafterNeeds(draft_slots=True), "keys and values"),
        (DrafterNeeds(all_or_nothing=True), "not written"),
    ],
)
def test_drafters_that_need_more_than_a_log_are_refused(
    monkeypatch: pytest.MonkeyPatch, needs: DrafterNeeds, reason: str
) -> None:
    drafter = NoneDrafter()
    drafter.info = DrafterInfo("greedy", "", False, needs=needs)
    monkeypatch.setattr(replay_module, "build_drafters", lambda names, *_: {names[0]: drafter})
    monkeypatch.setattr(replay_module, "drafter_names", lambda: ("greedy",))
    with pytest.raises(DrafterUnavailableError, match=f"'greedy' cannot be replayed.*{reason}"):
        build_replayable("greedy")


# --- logs ---


def test_logs_hold_texts_chats_and_token_ids(tmp_path: Path) -> None:
    path = write_log(
        tmp_path,
        {"prompt": "ab", "completion": "c"},
        {"prompt": [5, 6], "completion": [7], "cache_salt": "s", "note": 1},
        {"messages": [{"role": "user", "content": "x"}], "completion": "y"},
    )
    path.write_text(path.read_text() + "\n  \n")
    assert read_log(path, Letters, ["note"]) == [
        LogLine(1, [0, 97, 98], [99]),
        LogLine(2, [5, 6], [7], "s"),
        LogLine(3, [120, 58], [121]),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "not an object"),
        ({"completion": [1]}, "prompt is missing"),
        ({"prompt": [1]}, "completion is missing"),
        ({"prompt": [1], "completion": []}, "completion is empty"),
        ({"prompt": [], "completion": [1]}, "prompt is empty"),
        ({"prompt": 3, "completion": [1]}, "prompt must be text or a list of token ids"),
        ({"prompt": [1, -1], "completion": [1]}, r"prompt\[1\] is not a token id"),
        ({"prompt": [1], "completion": [1, True]}, r"completion\[1\] is not a token id"),
        ({"prompt": [1], "completion": [1, 2**24]}, r"completion\[1\] is not a token id"),
        ({"prompt": [1], "completion": [1], "cache_salt": 3}, "cache_salt must be a string"),
        ({"prompt": [1], "completion": [1], "sallt": ""}, "unknown field 'sallt'"),
        ({"prompt": [1], "messages": [], "completion": [1]}, "messages and prompt exclude"),
        ({"messages": [{"role": "user"}], "completion": [1]}, "messages: 'content'"),
        ({"prompt": "a\ud83d", "completion": [1]}, "prompt has halves of characters"),
    ],
)
def test_bad_lines_are_refused_by_number_and_field(
    tmp_path: Path, line: object, message: str
) -> None:
    path = write_log(tmp_path, {"prompt": [1], "completion": [2]}, line)
    with pytest.raises(LogError, match=f"^line 2: {message}"):
        read_log(path, Letters)


@pytest.mark.parametrize("read", [read_log, partial(read_trace, kinds={"chat": Kind(((1, 1),))})])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": [1]', "^line 1: not JSON"),
        (b"\n\n{", "^line 3: not JSON"),
        (b"\n", "no lines"),
        (b"\xff\xff", "not UTF-8"),
    ],
)
def test_what_is_no_json_is_refused_by_line(
    tmp_path: Path, read: Any, content: bytes, message: str
) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(LogError, match=message):
        read(tmp_path / "log", load_tokenizer=no_tokenizer)


# --- the command ---


def test_the_command_prints_and_writes_the_figures(tmp_path: Path, run: Run) -> None:
    log = write_log(tmp_path, {"prompt": [1, 2, 3, 1, 2, 3], "completion": [1, 2, 3] * 8})
    out = tmp_path / "out.json"
    flags = ["--drafters", "none,ngram", "--budgets", "3,7", "--json", out]
    lines = run("replay", log, *flags).out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][:4] == ["drafter", "shape", "budget", "tokens/step"]
    # ``none`` has no trees to offer; ``ngram`` is replayed in both shapes.
    assert [row[:6] for row in cells[2:]] == [
        ["none", "chain", "3", "1.00", "-", "0.00"],
        ["none", "chain", "7", "1.00", "-", "0.00"],
        ["ngram", "chain", "3", "4.00", "100.0%", "0.00"],
        ["ngram", "chain", "7", "8.00", "100.0%", "0.00"],
        ["ngram", "tree", "3", "4.00", "100.0%", "0.00"],
        ["ngram", "tree", "7", "8.00", "100.0%", "0.00"],
    ]
    document = json.loads(out.read_text())
    assert document["num_lines"] == 1
    assert document["step_cost"] == [list(pair) for pair in DEFAULT_STEP_COST]
    result = document["results"][3]
    assert (result["drafter"], result["shape"], result["budget"]) == ("ngram", "chain", 7)
    assert (result["num_steps"], result["num_tokens"], result["num_draft_tokens"]) == (3, 24, 21)


def test_texts_are_read_with_the_bundled_tokenizer(tmp_path: Path, run: Run) -> None:
    text = "def total(prices):\n    return sum(prices)\n"
    log = write_log(tmp_path, {"prompt": text * 2, "completion": text * 2})
    said = run("replay", log, "--drafters", "suffix", "--budgets", 8)
    rows = said.out.splitlines()[2:]
    assert [row.split("|")[2].strip() for row in rows] == ["chain", "tree"]
    assert all(float(row.split("|")[4]) > 4 for row in rows)


def test_token_ids_are_replayed_without_torch(tmp_path: Path) -> None:
    log = write_log(tmp_path, {"prompt": [1, 2, 1], "completion": [2, 1, 2]})
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers']));"
        f"from slipstream.cli import main; sys.exit(main(['replay', {str(log)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_step_cost_can_be_given(tmp_path: Path, run: Run) -> None:
    log = write_log(tmp_path, {"prompt": [1, 2, 3, 1, 2, 3], "completion": [1, 2, 3] * 8})
    cost, out = tmp_path / "cost.json", tmp_path / "out.json"
    cost.write_text("[[1, 1000], [4, 2000.0]]")
    common = ["replay", log, "--drafters", "ngram", "--shapes", "chain", "--budgets", 3]
    run(*common, "--step-cost", cost, "--json", out)
    (result,) = json.loads(out.read_text())["results"]
    assert result["estimated_speedup"] == pytest.approx(2.0, abs=0.01)


def test_step_costs_lie_on_lines_between_what_was_measured() -> None:
    cost = StepCost([(2, 1.0), (4, 2.0), (8, 3.0)])
    assert [cost.seconds(rows) for rows in (1, 2, 3, 4, 6, 8, 12)] == [1, 1, 1.5, 2, 2.5, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafters", "sufix"], "unknown drafter 'sufix'; known: none"),
        (["--drafters", "ngram,,suffix"], "empty item"),
        (["--budgets", "4,x"], "'x' is not a number from 1 to 1024"),
        (["--budgets", "0"], "'0' is not a number"),
        (["--shapes", "star"], "unknown shape 'star'"),
        (["--tree-width", "1"], "from 2 to 64"),
    ],
)
def test_bad_flags_are_refused_by_name(run: Run, arguments: list[str], message: str) -> None:
    err = run("replay", "log.jsonl", *arguments, status=2).err
    assert arguments[0] in err
    assert message in err


STEP_COSTS = [
    ("{", "not JSON"),
    ("{}", "must be a list"),
    ("[[1, 2.0]]", "at least two"),
    ("[[2, 1.0], [2, 1.0]]", "entry 1: rows must ascend"),
    ("[[1, 2, 3]]", r"entry 0 is not \[rows, seconds\]"),
    ("[[0, 2], [1, 2]]", "entry 0: rows"),
    ("[[1, -2], [2, 2]]", "entry 0: seconds"),
    ("[[1, true]]", "entry 0: seconds"),
]


@pytest.mark.parametrize(
    ("cost", "arguments", "message"),
    [
        *((cost, ["--step-cost", "COST"], f"--step-cost.*{told}") for cost, told in STEP_COSTS),
        ("", ["--drafters", "jacobi"], "drafter 'jacobi' cannot be replayed"),
        ("", ["--drafters", "medusa"], "drafter 'medusa' cannot be used"),
        ("", ["--drafters", "none", "--shapes", "tree"], ".*no trees"),
        ("", ["--ignore-fields", "other"], ".*line 1: unknown field 'note'"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_reason(
    tmp_path: Path, run: Run, cost: str, arguments: list[str], message: str
) -> None:
    (tmp_path / "cost.json").write_text(cost)
    log = write_log(tmp_path, {"prompt": [1], "completion": [2], "note": 3})
    given = [tmp_path / "cost.json" if each == "COST" else each for each in arguments]
    out, err = run("replay", log, *given, status=2)
    assert out == ""
    assert re.match(f"slipstream: {message}", err)
    assert "no.jsonl" in run("replay", tmp_path / "no.jsonl", status=2).err


def test_plots_need_matplotlib_and_say_so_first(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert ".[plot]" in run("replay", tmp_path / "no.jsonl", "--plot", "x.png", status=2).err


def test_a_plot_has_a_line_per_drafter_and_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: figures.append(figure))
    cases = [ReplayCase("ngram", width, budget) for width in (1, 4) for budget in (7, 3)]
    results = [played(case, PERIODIC) for case in cases]
    report.plot(results, tmp_path / "out.png")
    tokens, speedup = (
        {line.get_label(): ([*line.get_xdata()], [*line.get_ydata()]) for line in axes.lines}
        for axes in figures[0].axes
    )
    assert tokens == {"ngram chain": ([3, 7], [4.0, 8.0]), "ngram tree": ([3, 7], [4.0, 8.0])}
    assert speedup["ngram chain"][1] == pytest.approx([4.0, 8.0])
