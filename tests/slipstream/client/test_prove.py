"""``slipstream prove``: what it asks for, which answers it takes to be equal, and what its status means.
``tests/end_to_end/test_prove_server.py`` lets it find faults of the engine."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from scipy.stats import chi2

from slipstream.client.prove_answers import (
    FALSE_ALARMS,
    FREEDOM,
    Answer,
    chi_squared_tail,
    first_difference,
    judge_draws,
    read_answer,
)
from slipstream.client.prove_plan import Offer, make_plan
from worlds.client_servers import listening
from worlds.commands import Run, Said

CATALOGUE: Mapping[str, Any] = {
    "data": [
        {"id": name, "drafts_trees": trees, "draws": draws, "takes_prediction": name == "auto"}
        for name, trees, draws in (
            ("none", False, False),
            ("ngram", True, False),
            ("small_model", True, True),
            ("grammar", False, False),
            ("auto", True, False),
        )
    ],
    "policies": ["fixed", "goodput"],
    "verifications": ["match", "rejection", "block"],
    "caps": {"max_speculative_tokens": 4, "max_tree_width": 2, "max_tree_depth": 3},
    "defaults": {"draft_strategy": "auto"},
}


# --- the plan ---


def test_a_plan_follows_from_its_seed_and_holds_every_drafter_and_shape() -> None:
    plan = make_plan(Offer(CATALOGUE), 200, 3, "run")
    assert plan == make_plan(Offer(CATALOGUE), 200, 3, "run")
    assert plan.cases != make_plan(Offer(CATALOGUE), 200, 4, "run").cases
    assert len(plan.trials) + len(plan.drawn) == 200
    drafters = {each.arm.labels["drafter"] for each in plan.trials}
    assert drafters == {each["id"] for each in CATALOGUE["data"]}
    shapes = {each.arm.labels["drafts"] for each in plan.trials if "drafts" in each.arm.labels}
    assert shapes == {"chain", "tree", "goodput"}
    for name in ("kind", "prompt", "sampling", "log-probabilities", "company"):
        assert len({each.labels[name] for each in plan.trials}) > 1
    ways = {each.arm.labels["drafts"] for each in plan.drawn}
    assert ways == {"rejection, chain", "rejection, tree", "block, chain"}


def test_a_plan_keeps_to_the_servers_caps_and_names_the_grammar_only_where_there_is_one() -> None:
    plan = make_plan(Offer(CATALOGUE), 400, 0, "run")
    for trial in (*plan.trials, *plan.drawn):
        speculative = trial.fields()["speculative"]
        assert speculative.get("num_speculative_tokens", 0) <= 4
        assert speculative.get("tree_width", 0) <= 2
        is_grammar = speculative["draft_strategy"] == "grammar"
        assert not is_grammar or "response_format" in trial.case.fields


def test_two_trials_find_their_prompt_and_the_others_an_empty_cache() -> None:
    plan = make_plan(Offer(CATALOGUE), 80, 0, "run")
    for case in plan.cases[:-1]:
        own = Counter(each.cache for each in plan.trials if each.case is case)
        assert max(own.values()) == 4
        assert list(own.values()).count(1) == 4


def test_most_of_the_text_is_predicted_to_those_who_read_predictions() -> None:
    plan = make_plan(Offer(CATALOGUE), 200, 0, "run")
    for trial in plan.trials:
        predicted = trial.fields("x" * 30).get("prediction", {}).get("content")
        assert predicted == ("x" * 22 if trial.arm.labels["drafter"] == "auto" else None)


def test_other_servers_are_asked_with_openais_fields_only() -> None:
    plan = make_plan(Offer(), 60, 0, "run")
    own = {"speculative", "cache_salt", "top_k", "min_p", "bad_words", "repetition_penalty"}
    assert not any(own & set(each.fields()) for each in plan.trials)
    assert not plan.drawn


# --- answers ---


def answer(text: str = "ab", *values: float, ids: tuple[int, ...] = (1, 2), **more: Any) -> Answer:
    tokens = [(token_id, letter) for token_id, letter in zip(ids, text, strict=False)]
    told = [(value, {"x": value}) for value in values] or None
    fields = {"tokens": tokens, "logprobs": told, "finish_reason": "stop"}
    return Answer(text=text, **{**fields, "num_accepted": 0, "num_cached": 0, **more})


def test_equal_answers_have_no_difference() -> None:
    assert first_difference(answer("ab", -1.0, -2.0), answer("ab", -1.0, -2.0)) is None
    assert first_difference(answer("ab", -1.0, -2.0), answer("ab")) is None


TOLD = answer("ab", -1.0, -2.0)
# The first token that differs is named with both log-probabilities; texts without tokens part at a
# character.
DIFFERENCES: dict[str, tuple[Answer, Answer, dict[str, Any]]] = {
    "another text": (
        TOLD,
        answer("ac", -1.0, -3.0, ids=(1, 3)),
        {"what": "text", "token": 1, "character": 1, "plain": "b", "written": "c"}
        | {"plain_logprob": -2.0, "written_logprob": -3.0},
    ),
    "other tokens of an equal text": (
        answer("ab"),
        answer("ab", ids=(1, 9)),
        {"what": "text", "token": 1},
    ),
    "the beginning of the other": (
        answer("ab"),
        answer("a", ids=(1,)),
        {"token": 1, "plain": "b", "written": "(end)"},
    ),
    "one bit of a log-probability": (
        TOLD,
        answer("ab", -1.0, math.nextafter(-2.0, 0)),
        {"what": "log-probabilities", "token": 1},
    ),
    "another end": (
        answer(),
        answer(finish_reason="length"),
        {"what": "end", "plain": "stop", "written": "length"},
    ),
    "no tokens": (
        answer("hello", tokens=None),
        answer("help", tokens=None),
        {"token": None, "character": 3, "written": "p"},
    ),
}


@pytest.mark.parametrize(("plain", "written", "told"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_the_first_difference_is_told(plain: Answer, written: Answer, told: dict[str, Any]) -> None:
    found = first_difference(plain, written)
    assert {name: getattr(found, name) for name in told} == told


def test_log_probabilities_are_read_in_both_forms() -> None:
    other = {"token": "b", "logprob": -2}
    chat = {"content": [{"token": "a", "logprob": -1, "top_logprobs": [other]}]}
    plain = {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{"b": -2}]}
    for told in (chat, plain):
        found = read_answer({"choices": [{"text": "a", "logprobs": told}]})
        assert found.logprobs == [(-1, {"b": -2})]
        assert found.tokens == [("a", "a")]


# --- draws ---

PROBS = (0.5, 0.25, 0.15, 0.1)
SAID = {f"token_id:{each}": math.log(prob) for each, prob in enumerate(PROBS)}


def drawn(weights: tuple[float, ...], count: int) -> Iterator[tuple[str, int, Answer]]:
    rng = random.Random(1)
    for number in range(count):
        tokens = rng.choices(range(4), weights, k=48)
        yield "group", number, drew(tokens)


def drew(tokens: Sequence[int]) -> Answer:
    return answer(tokens=None, logprobs=[(math.log(PROBS[each]), SAID) for each in tokens])


def test_draws_from_the_told_distribution_are_not_accused() -> None:
    found = judge_draws(drawn(PROBS, 100))
    assert {each.name for each in found} == {"all", "group"}
    assert all(each.p > 1e-3 for each in found)
    assert sum(each.alarm for each in found) == pytest.approx(FALSE_ALARMS)


def test_draws_from_another_distribution_are_accused() -> None:
    assert all(each.p < each.alarm for each in judge_draws(drawn((0.65, 0.2, 0.1, 0.05), 100)))


def test_draws_that_repeat_each_other_are_accused() -> None:
    rng = random.Random(2)
    tokens = [token for token in rng.choices(range(4), PROBS, k=600) for _ in range(2)]
    assert all(each.p < each.alarm for each in judge_draws([("group", 0, drew(tokens))]))


def test_few_draws_are_not_tested() -> None:
    assert judge_draws(drawn(PROBS, 2)) == []


@pytest.mark.parametrize("statistic", [0.5, 15.0, 60.0, 200.0])
def test_the_tail_of_chi_squared(statistic: float) -> None:
    assert chi_squared_tail(statistic) == pytest.approx(chi2.sf(statistic, FREEDOM), rel=1e-9)


# --- the command ---


class WholeServer:
    """Writes the same text every time, but for every ``slips``-th request, where it has that. ``card``:
    further fields of its model's. A Slipstream server where ``catalogue`` is given."""

    def __init__(
        self,
        catalogue: Any = None,
        slips: int = 0,
        refuses: str = "",
        most: int = 1000,
        **card: Any,
    ) -> None:
        """``most``: requests after which it breaks."""
        self.bodies: list[dict[str, Any]] = []
        self._slips, self._refuses, self._most = slips, refuses, most
        self.app = FastAPI()
        models = {"data": [{"id": "m", "has_chat_template": True, **card}]}
        self.app.get("/v1/models")(lambda: models)
        if catalogue is not None:
            self.app.get("/v1/drafters")(lambda: catalogue)
        self.app.post("/v1/completions")(self._answer)
        self.app.post("/v1/chat/completions")(self._answer)

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self._refuses in body:
            return JSONResponse({"error": {"message": f"no {self._refuses}"}}, 400)
        if len(self.bodies) > self._most:
            return JSONResponse({"error": {"message": "broken"}}, 500)
        slipped = self._slips and not len(self.bodies) % self._slips
        text = "one two" if slipped else "one too"
        told: Any = None
        if body.get("logprobs"):
            words = [text[:4], text[4:]]
            told = {"content": [{"token": each, "logprob": -0.5} for each in words]}
        choice = {"finish_reason": "stop", "logprobs": told}
        choice |= {"message": {"content": text}} if "messages" in body else {"text": text}
        return JSONResponse({"choices": [choice]})


def prove(run: Run, server: WholeServer, *flags: object, status: int = 0) -> Said:
    with listening(server.app) as url:
        return run("prove", url, "--requests", 40, *flags, status=status)


def test_a_server_that_keeps_its_promise_ends_with_0(run: Run) -> None:
    server = WholeServer(CATALOGUE, determinism="exact", exact_verified=True)
    assert "**35 of 35 texts equal**" in prove(run, server).out
    plain = [each for each in server.bodies if each["speculative"]["draft_strategy"] == "none"]
    assert len(plain) >= 5


def test_a_promise_that_is_not_kept_ends_with_1_and_says_where(tmp_path: Path, run: Run) -> None:
    files = tmp_path / "p.json", tmp_path / "p.md"
    server = WholeServer(CATALOGUE, slips=11, determinism="exact", exact_verified=True)
    out, _ = prove(run, server, "--json", files[0], "--markdown", files[1], status=1)
    assert "Not kept: determinism" in out
    assert "token 1: 'too' (-0.500000), 'two' (-0.500000)" in out
    assert files[1].read_text() == out
    found = json.loads(files[0].read_text())
    assert found["num_compared"] == len(found["requests"]) > found["num_equal"]
    (first, *_) = [each for each in found["requests"] if each["difference"]]
    assert first["body"]["speculative"]


def test_a_body_is_told_as_it_was_sent(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "p.json"
    server = WholeServer(CATALOGUE, slips=3)
    prove(run, server, "--json", file)
    for each in server.bodies:
        del each["speculative"]["return_drafted"]
    found = json.loads(file.read_text())["requests"]
    told = [each["body"] for each in found if each["difference"]]
    assert any("prediction" in each for each in told)
    assert all(each in server.bodies for each in told)


@pytest.mark.parametrize(
    "card", [{"determinism": "fast"}, {"determinism": "exact", "exact_verified": False}, {}]
)
def test_where_nothing_is_promised_differences_are_only_told(
    card: dict[str, Any], run: Run
) -> None:
    out, _ = prove(run, WholeServer(CATALOGUE, slips=11, **card))
    assert "Differences" in out
    assert "Near-ties" in out


def test_another_server_is_compared_with_a_second_one(run: Run) -> None:
    reference = WholeServer()
    with listening(reference.app) as against:
        said = prove(run, WholeServer(slips=10), "--against", against)
    assert "4 of 40" not in said.err
    assert len(reference.bodies) == 5
    assert not any("speculative" in each for each in reference.bodies)


def test_what_is_not_answered_is_told_and_proves_nothing(run: Run) -> None:
    assert ": no response_format" in prove(run, WholeServer(refuses="response_format")).out
    assert "nothing is proven" in prove(run, WholeServer(refuses="model"), status=2).err


def test_what_came_before_the_server_broke_is_told(run: Run) -> None:
    out, err = prove(run, WholeServer(CATALOGUE, most=20, determinism="exact"), status=2)
    assert "Ended early: broken" in out
    assert " texts equal**" in out
    assert err.endswith("slipstream: broken\n")
    prove(run, WholeServer(CATALOGUE, most=20, slips=7, determinism="exact"), status=1)


def test_no_server_is_not_a_broken_promise(run: Run) -> None:
    assert "no server answers" in run("prove", "http://127.0.0.1:9", status=2).err


def test_flags_are_checked_before_anything_is_sent(tmp_path: Path, run: Run) -> None:
    assert "cannot write" in run("prove", "--json", tmp_path / "no" / "p.json", status=2).err
    assert "--requests" in run("prove", "--requests", "none", status=2).err
