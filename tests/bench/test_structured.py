"""``bench.structured`` makes requests, measures, and writes down its figures."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import pytest

from bench import structured
from bench.structured import GAMMA_0, Account, GrammarClock, random_call, rows_of, timed_call
from server.request.grammars import json_grammar


def test_random_calls_have_schemas_that_can_be_held_to() -> None:
    for seed in range(10):
        call = random_call(random.Random(seed))
        jsonschema.Draft202012Validator.check_schema(call.schema)
        assert json_grammar(call.schema, "schema")
        assert call.schema["properties"]["name"]["const"] in call.prompt
        assert json.loads(call.prompt.splitlines()[1]) == call.schema["properties"]["arguments"]


@pytest.mark.slow
def test_figures_are_against_gamma_0_at_the_same_temperature() -> None:
    accounts = [
        Account(GAMMA_0, 0.0, [(1, 2)], 10, 0, 0, 4.0, 0.1),
        Account("grammar", 0.0, [(1, 2)], 4, 8, 6, 2.0, 0.1),
        Account(GAMMA_0, 0.7, [(1, 2)], 20, 0, 0, 4.0, 0.1),
        Account("grammar", 0.7, [(1, 3)], 5, 8, 8, 1.0, 0.1),
    ]
    assert rows_of(accounts) == [
        ["0", GAMMA_0, "10", "0%", "-", "1.00x", "2.5%", "1/1"],
        ["0", "grammar", "4", "60%", "75%", "2.00x", "5.0%", "1/1"],
        ["0.7", GAMMA_0, "20", "0%", "-", "1.00x", "2.5%", "1/1"],
        ["0.7", "grammar", "5", "75%", "100%", "4.00x", "10.0%", "0/1"],
    ]


def test_what_was_measured_is_written_with_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "TEMPERATURES", (0.0,))
    output = tmp_path / "structured.json"
    arguments = ["--calls", "1", "--max-tokens", "4", "--drafters", "grammar"]
    assert structured.main([*arguments, "--output", str(output)]) == 0
    machine, figures = json.loads(output.read_text(encoding="utf-8"))
    assert machine["device"] == "cpu"
    assert [each["drafter"] for each in figures] == [GAMMA_0, "grammar"]


def test_work_inside_of_work_is_counted_once() -> None:
    clock = GrammarClock()
    seen: list[float] = []
    inner = timed_call(lambda: seen.append(clock.seconds), clock)
    timed_call(lambda: (inner(), seen.append(clock.seconds)), clock)()
    assert seen == [0.0, 0.0]
    assert clock.seconds > 0
