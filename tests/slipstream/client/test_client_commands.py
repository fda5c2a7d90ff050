"""The commands as they are typed, against real servers over HTTP; standard output is a pipe."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.client.bench import read_prompts
from slipstream.client.bench_report import UNSTEADY
from slipstream.client.spec_bench import Questions
from worlds.client_servers import OtherServer, ScriptedEngine, listening, slipstream
from worlds.commands import Run
from worlds.many_models import built
from worlds.scripted_engine import engine_info, prompt_text

pytestmark = pytest.mark.slow

MARKED = "h⟦el⟧l⟦o⟧ w⟦or⟧ld\n"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine("hello world")


@pytest.fixture
def url(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with slipstream(engine) as found:
        monkeypatch.setenv("SLIPSTREAM_URL", found)
        yield found


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherServer]:
    server = OtherServer()
    with listening(server.app) as found:
        monkeypatch.setenv("SLIPSTREAM_URL", found)
        yield server


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


# --- complete ---


@pytest.mark.usefixtures("url")
def test_a_pipe_gets_bare_text_and_the_account_goes_to_stderr(run: Run) -> None:
    out, err = run("complete", "say")
    assert out == "hello world\n"
    assert "# 11 tokens, ended; first after" in err
    drafts = "7 of 10 drafts accepted (70.0%), mean gamma 2.50"
    assert f"# ngram: 4 steps of 2.75 tokens, {drafts}" in err
    assert "\x1b" not in out + err
    assert "waiting" not in err
    assert run("complete", "say", "--quiet", "--mark", "brackets") == (MARKED, "")


def test_flags_become_the_request(url: str, engine: ScriptedEngine, run: Run) -> None:
    flags = "--drafter nasd --gamma 3 --tree tree --option decay=0.25 --option fill=false"
    sampling = "--max-tokens 7 --temperature 0.5 --top-k 9 --seed 4 --field min_tokens=2"
    run("complete", "ab", "--url", f"{url}/v1", *flags.split(), *sampling.split())
    (request,) = engine.requests
    speculative, params = request.speculative, request.sampling
    assert (speculative.draft_strategy, speculative.adaptive_depth) == ("nasd", "fixed")
    assert speculative.num_speculative_tokens == 3
    assert dict(speculative.options) == {"decay": 0.25, "fill": False}
    assert (params.max_tokens, params.temperature, params.top_k) == (7, 0.5, 9)
    assert (params.seed, params.min_tokens) == (4, 2)


@pytest.mark.parametrize("arguments", [[], ["-"]])
@pytest.mark.usefixtures("url")
def test_a_prompt_comes_through_a_pipe(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, run: Run, arguments: list[str]
) -> None:
    pipe(monkeypatch, "from a pipe\n")
    run("complete", *arguments)
    assert bytes(engine.requests[0].prompt_token_ids[-12:]) == b"from a pipe\n"
    # Nobody has said how to sample, and from the whole distribution small models write noise.
    assert engine.requests[0].sampling.temperature == 0.2


def test_breaks_that_json_leaves_as_they_are_end_no_event(run: Run) -> None:
    text = "one\u2028two\u2029three\x85four"
    with slipstream(ScriptedEngine(text, group_sizes=(400,))) as url:
        assert json.loads(run("complete", "say", "--url", url, "--json").out)["text"] == text


def test_what_the_model_or_the_operator_says_of_sampling_is_left_as_it_is(run: Run) -> None:
    engine = ScriptedEngine(info=engine_info(sampling_defaults={"top_k": 20}))
    with slipstream(engine) as url:
        run("chat", "--message", "hi", "--url", url)
    assert (engine.requests[0].sampling.temperature, engine.requests[0].sampling.top_k) == (1, 20)


@pytest.mark.usefixtures("url")
def test_json_holds_the_whole_reply(run: Run) -> None:
    out, err = run("complete", "say", "--json")
    reply = json.loads(out)
    assert reply["text"] == "hello world"
    assert "".join(token["text"] for token in reply["tokens"] if token["drafted"]) == "eloor"
    assert reply["usage"]["speculative"]["num_accepted_tokens"] == 7
    assert err == ""


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--drafter", "nope"], 1, "draft_strategy must be one of: none, ngram"),
        (["--drafter", "none", "--gamma", "2"], 1, "has no effect with draft_strategy 'none'"),
        (["--temperature", "-1"], 1, "temperature"),
        (["--temperature", "nan"], 2, "numbers have to be finite"),
        (["--drafter", "ngram", "--speculative", "draft_strategy=none"], 2, "is given twice"),
        (["--field", "n=2"], 2, "--field n"),
        (["--url", "nowhere"], 1, "'nowhere' is not an address"),
    ],
)
@pytest.mark.usefixtures("url")
def test_what_is_refused_is_said_in_one_line(
    run: Run, flags: list[str], status: int, message: str
) -> None:
    out, err = run("complete", "x", *flags, status=status)
    assert out == ""
    assert err.startswith("slipstream: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [["complete", "x"], ["chat", "--message", "x"], ["bench"]])
def test_a_refused_connection_is_explained(run: Run, command: list[str]) -> None:
    with socket.socket() as taken:
        # Bound, and nobody listens.
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert f"no server answers at {url}" in run(*command, "--url", url, status=1).err


def test_a_key_comes_by_flag_or_variable(
    engine: ScriptedEngine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slipstream(engine, api_key="sesame") as url:
        refused = run("complete", "x", "--url", url, status=1)
        assert "--api-key, or the variable SLIPSTREAM_API_KEY" in refused.err
        run("complete", "x", "--url", url, "--api-key", "sesame")
        monkeypatch.setenv("SLIPSTREAM_API_KEY", "sesame")
        run("complete", "x", "--url", url)


@pytest.mark.parametrize("key", ["", "sesame\n", "sesame ", "s\u00e9same"])
@pytest.mark.usefixtures("url")
def test_a_key_that_no_header_can_carry_is_not_a_lost_connection(run: Run, key: str) -> None:
    said = run("complete", "x", "--api-key", key, status=1)
    assert "the API key is empty, or has characters" in said.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "--message", "x", "--system", "half \ud83d"],
        ["complete", "x", "--option", "decay=NaN"],
        ["complete", "x", "--speculative", "tree_width=Infinity"],
        ["bench", "--prompts", "PROMPTS"],
    ],
)
@pytest.mark.usefixtures("url")
def test_what_json_cannot_carry_is_refused(
    engine: ScriptedEngine, run: Run, tmp_path: Path, arguments: list[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "half \\ud83d"}\n')
    said = run(*(each.replace("PROMPTS", str(path)) for each in arguments), status=1)
    assert "numbers that are not finite, or halves of characters" in said.err
    assert engine.requests == []


@pytest.mark.usefixtures("url")
def test_what_came_before_a_failure_stays(engine: ScriptedEngine, run: Run) -> None:
    engine.break_after = 2
    out, err = run("complete", "x", status=1)
    assert out == "hell\n"
    assert "slipstream: " in err
    assert "Traceback" not in err


# --- another server ---


def test_another_server_is_used_and_said_to_tell_nothing(other: OtherServer, run: Run) -> None:
    out, err = run("complete", "count", "--mark", "brackets", "--seed", "1")
    assert out == "one two three\n"
    assert "# 5 tokens, ended" in err
    assert "# this server does not tell which tokens were drafted" in err
    assert other.bodies[0]["model"] == "other/model"
    assert "temperature" not in other.bodies[0]
    assert run("chat", "--message", "count").out == "one two three\n"


def test_another_servers_refusal_is_told(other: OtherServer, run: Run) -> None:
    assert "refused: [], mine" in run("complete", "count", "--model", "mine", status=1).err
    refused = run("complete", "count", "--drafter", "ngram", status=2)
    assert "this server is not Slipstream" in refused.err
    assert len(other.bodies) == 1


# --- chat ---


@pytest.mark.usefixtures("url")
def test_piped_lines_are_turns_and_commands(
    engine: ScriptedEngine, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = tmp_path / "talk.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    turns = ["hi", "/drafter nasd", "again\\", "and\\", "so on", "/save ~/talk.json"]
    turns += ["/reset", "//new", "/history"]
    pipe(monkeypatch, "\n".join([*turns, "/quit", "not sent"]))
    out, err = run("chat", "--system", "be brief", "--drafter", "ngram", "--gamma", "2")
    assert out == "hello world\n" * 3
    start = "system: be brief\nuser: "
    assert [*map(prompt_text, engine.requests)] == [
        f"{start}hi\n",
        f"{start}hi\nassistant: hello world\nuser: again\nand\nso on\n",
        f"{start}/new\n",
    ]
    drafters = [each.speculative.draft_strategy for each in engine.requests]
    assert drafters == ["ngram", "nasd", "nasd"]
    assert "drafting with nasd, without the adaptive_depth, num_speculative_tokens given" in err
    assert "# user: /new\n# assistant: hello world" in err
    assert [each["content"] for each in json.loads(saved.read_text())["messages"]] == [
        *("be brief", "hi", "hello world", "again\nand\nso on", "hello world")
    ]

    pipe(monkeypatch, "/load ~/talk.json\nmore\n")
    run("chat")
    last = prompt_text(engine.requests[-1])
    assert last.endswith("so on\nassistant: hello world\nuser: more\n")


@pytest.mark.parametrize("line", ["/drafter nope", "/bogus", "/load /nowhere/x", "/save"])
@pytest.mark.usefixtures("url")
def test_a_command_that_fails_ends_a_piped_conversation(
    engine: ScriptedEngine, run: Run, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    pipe(monkeypatch, f"{line}\nnot sent\n")
    assert run("chat", status=2).err.startswith("slipstream: ")
    assert engine.requests == []


# --- bench ---


@pytest.mark.usefixtures("url")
def test_a_bench_compares_with_plain_decoding(
    engine: ScriptedEngine, run: Run, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}]}\n')
    json_path, plot_path = tmp_path / "out.json", tmp_path / "out.png"
    flags = f"--prompts {prompts} --requests 3 --rounds 2 --concurrency 2 --drafters ngram,nasd"
    files = ["--json", json_path, "--plot", plot_path]
    out, err = run("bench", *flags.split(), "--gamma", "4", *files)
    # Rounds this short may differ by any amount.
    assert err in ("", f"# {UNSTEADY}\n")
    assert "| equal texts |" in out
    assert out.count("6 of 6") == 3
    assert "| to the first token |" in out
    assert plot_path.read_bytes().startswith(b"\x89PNG")

    drafters = [each.speculative.draft_strategy for each in engine.requests]
    # Warm-ups, then rounds whose order rotates.
    assert drafters[:3] == ["none", "ngram", "nasd"]
    rounds = ["none", "ngram", "nasd", "ngram", "nasd", "none"]
    assert drafters[3:] == [name for name in rounds for _ in range(3)]
    counted = engine.requests[3:]
    assert {each.speculative.num_speculative_tokens for each in counted} == {0, 4}
    assert len({each.cache_salt for each in counted}) == len(rounds)

    document = json.loads(json_path.read_text())
    assert document["model"]["id"] == "test/scripted"
    assert [arm["name"] for arm in document["arms"]] == ["none", "ngram", "nasd"]
    for arm in document["arms"]:
        assert arm["num_tokens"] == 6 * 11
        assert len(arm["requests"]) == 6
        assert len(arm["speedup_by_round"]) == 2
        assert set(arm["latency"]) == {"p50", "p90", "p99"}
        assert arm["acceptance_rate"] == pytest.approx(0.7)
    assert document["arms"][0]["speedup"] == pytest.approx(1.0)


def test_lines_of_files_end_at_line_feeds_alone(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"
    prompt, question = {"prompt": text}, {"question_id": 1, "category": "qa", "turns": [text]}
    files = tmp_path / "prompts.jsonl", tmp_path / "questions.jsonl"
    for file, line in zip(files, (prompt, question), strict=True):
        file.write_text(json.dumps(line, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [each.fields for each in read_prompts(files[0])] == [prompt]
    assert Questions(files[1]).of("qa") == [question]


@pytest.mark.usefixtures("url")
def test_a_bench_asks_all_turns_of_spec_benchs_questions(
    engine: ScriptedEngine, run: Run, tmp_path: Path
) -> None:
    file, json_path = tmp_path / "question.jsonl", tmp_path / "out.json"
    lines: list[dict[str, object]] = [
        {"question_id": 81, "category": "writing", "turns": ["first?", "second?"]},
        {"question_id": 82, "category": "writing", "turns": ["left out"]},
        {"question_id": 201, "category": "qa", "turns": ["only?"]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = f"--spec-bench {file} --ids odd --rounds 1 --concurrency 1 --json {json_path}"
    out = run("bench", *flags.split(), "--drafters", "ngram").out
    header = next(line for line in out.splitlines() if "speed-up (tokens/step)" in line)
    assert [each.strip() for each in header.split("|")[2:-1]] == ["mt_bench", "qa"]
    assert "x (2.75)" in out
    # Both arms warm up by the first question; then each asks three times.
    asked = [*map(prompt_text, engine.requests)]
    assert len(asked) == 2 * 2 + 2 * 3
    assert not any("left out" in text for text in asked)
    first, second, only = asked[4:7]
    assert "first?" in first
    assert second.index("first?") < second.index("hello world") < second.index("second?")
    assert "only?" in only
    arms = json.loads(json_path.read_text())["arms"]
    assert arms[1]["by_group"]["mt_bench"]["num_requests"] == 2
    assert [each["group"] for each in arms[1]["requests"]] == ["mt_bench", "mt_bench", "qa"]


@pytest.mark.parametrize("model", ["one", "two"])
def test_a_server_of_several_models_is_slipstream_too(run: Run, tmp_path: Path, model: str) -> None:
    """The first model is the one that is asked where none is named."""
    named = [] if model == "one" else ["--model", model]
    file = tmp_path / "out.json"
    app, _, launchers, _ = built(["one", "two"], 1e6, lambda: 1 << 62)
    with listening(app) as url:
        said = run("complete", "a", "--url", url, "--drafter", "ngram", *named)
        assert said.out.startswith(model)
        engine: Any = launchers[model].engine
        assert engine.requests[-1].speculative.draft_strategy == "ngram"
        flags = f"--url {url} --requests 1 --rounds 1 --drafters ngram --json {file}"
        run("bench", *flags.split(), *named)
    assert json.loads(file.read_text())["model"]["id"] == model


def test_another_server_is_measured_as_it_is(other: OtherServer, run: Run) -> None:
    out, err = run("bench", "--requests", "4", "--rounds", "1")
    assert "measured as it is, without a baseline" in err
    assert "| as it is |" in out
    assert len(other.bodies) == 5
    refused = run("bench", "--drafters", "ngram", status=2)
    assert "this server is not Slipstream" in refused.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--drafters nope", "this server has no drafter 'nope'"),
        ("--drafters ngram,ngram", "names a drafter twice"),
        ("--drafters ngram nope", "this server has no drafter 'nope'"),
        ("--drafters ngram --drafters nope", "this server has no drafter 'nope'"),
        ("--drafters none", "nothing to compare"),
        ("--plot out.txt", "must end with one of"),
        ("--json /nowhere/x.json", "cannot write"),
        ("--prompts /nowhere/x.jsonl", "cannot read"),
        ("--spec-bench /nowhere/x.jsonl", "--spec-bench: "),
        ("--spec-bench README.md", "--spec-bench: "),
        ("--spec-bench x --prompts y", "--prompts and --spec-bench"),
        ("--ids odd", "--ids and --per-category"),
        ("--field max_tokens=3", "--field max_tokens"),
        ("--field seed=3", "--field seed"),
        ("--field cache_salt=x", "--field cache_salt"),
    ],
)
@pytest.mark.usefixtures("url")
def test_a_bench_checks_its_flags_before_it_runs(
    engine: ScriptedEngine, run: Run, flags: str, message: str
) -> None:
    assert message in run("bench", *flags.split(), status=2).err
    assert engine.requests == []


@pytest.mark.parametrize(
    "wrong", [{"question_id": "a1"}, {"category": ["qa"]}, {"turns": [1]}, {"turns": []}]
)
@pytest.mark.usefixtures("url")
def test_a_question_of_other_types_is_named(
    run: Run, tmp_path: Path, wrong: dict[str, object]
) -> None:
    path = tmp_path / "questions.jsonl"
    question = {"question_id": 1, "category": "qa", "turns": ["why?"]}
    path.write_text(f"{json.dumps(question)}\n{json.dumps(question | wrong)}\n")
    said = run("bench", "--spec-bench", path, status=2)
    assert "--spec-bench: question 2 has no " in said.err


@pytest.mark.parametrize("line", ["no json", "[]", '{"prompt": "a", "messages": []}', "{}"])
def test_a_bad_line_of_prompts_is_named(run: Run, tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    assert f"{path}, line 2: " in run("bench", "--prompts", path, status=2).err
