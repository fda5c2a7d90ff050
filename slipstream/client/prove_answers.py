"""A server's answers in ``slipstream prove``: where two answers diverge, and whether tokens were drawn
from the distribution that the server itself reports."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from slipstream.client.errors import ClientError
from slipstream.client.prove_plan import TOP_LOGPROBS

FALSE_ALARMS = 1e-6
"""The probability that any of a run's tests accuses a server that draws as it should."""
FREEDOM = 15
_NUM_BINS = 4
"""Bins per side of the square that pairs fall into: ``_NUM_BINS ** 2 == FREEDOM + 1``."""
_FEWEST_PAIRS = 80
"""Below so many the statistic is not distributed as chi-squared is."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``tokens``: ids and texts; the texts twice where ids are not told; None where neither is.
    ``logprobs``: of each token its own log-probability and those of the likeliest, by name; None where
    they are not told."""

    text: str
    finish_reason: str | None
    tokens: Sequence[tuple[int | str, str]] | None
    logprobs: Sequence[tuple[float, Mapping[str, float]]] | None
    num_accepted: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class Difference:
    """``what``: "text", "end" or "log-probabilities". ``token``: the index of the first that differs;
    None where tokens are not told, and then ``character``. ``plain`` and ``written``: what stands there
    in the text without drafts and in the other, and its log-probability there."""

    what: str
    token: int | None
    character: int | None
    plain: str
    written: str
    plain_logprob: float | None = None
    written_logprob: float | None = None


def read_answer(found: Any) -> Answer:
    """Reads a completion's or a chat's answer. Raises ClientError for anything else."""
    try:
        choice, usage = found["choices"][0], found.get("usage") or {}
        text = (choice["message"]["content"] if "message" in choice else choice["text"]) or ""
        told = _told_logprobs(choice.get("logprobs"))
        tokens: list[tuple[int | str, str]] = [
            (each["id"], each["text"]) for each in choice.get("tokens") or ()
        ] or [(name, name) for name, _, _ in told or ()]
        return Answer(
            text,
            choice.get("finish_reason"),
            None if text and not tokens else tokens,
            None if told is None else [(value, top) for _, value, top in told],
            (usage.get("speculative") or {}).get("num_accepted_tokens", 0),
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ClientError("an answer is not in the form of OpenAI's; check the address") from error


def _told_logprobs(told: Any) -> list[tuple[str, float, dict[str, float]]] | None:
    """Each token's name, log-probability and the likeliest tokens': in the form of chats, which some
    servers give to completions, too, or in that of completions."""
    if not told:
        return None
    if told.get("content") is not None:
        tops = [each.get("top_logprobs") or () for each in told["content"]]
        return [
            (each["token"], each["logprob"], {one["token"]: one["logprob"] for one in top})
            for each, top in zip(told["content"], tops, strict=True)
        ]
    tops = told.get("top_logprobs") or [{}] * len(told["tokens"])
    return list(zip(told["tokens"], told["token_logprobs"], tops, strict=True))


def first_difference(plain: Answer, other: Answer) -> Difference | None:
    """None where text, end, tokens and log-probabilities are equal, these to the bit."""
    token, character = _parting_token(plain, other), _parting(plain.text, other.text)
    what = "text"
    if token is None and character is None:
        if plain.finish_reason != other.finish_reason:
            return Difference("end", None, None, str(plain.finish_reason), str(other.finish_reason))
        what, is_told = "log-probabilities", None not in (plain.logprobs, other.logprobs)
        token = _parting(plain.logprobs or (), other.logprobs or ()) if is_told else None
        if token is None:
            return None
    one, its_value = _shown(plain, token, character)
    two, other_value = _shown(other, token, character)
    return Difference(what, token, character, one, two, its_value, other_value)


def _parting_token(plain: Answer, other: Answer) -> int | None:
    """None also where one of them does not tell its tokens, or tells them in another way."""
    if plain.tokens is None or other.tokens is None:
        return None
    names = [[name for name, _ in each.tokens or ()] for each in (plain, other)]
    is_one_way = len({type(name) for own in names for name in own}) <= 1
    return _parting(*names) if is_one_way else None


def _parting(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    pairs = zip_longest(one, other)
    return next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), None)


def _shown(answer: Answer, token: int | None, character: int | None) -> tuple[str, float | None]:
    if token is None:
        return answer.text[character or 0 :][:12] or "(end)", None
    tokens, logprobs = answer.tokens or (), answer.logprobs or ()
    text = tokens[token][1] if token < len(tokens) else "(end)"
    return text, logprobs[token][0] if token < len(logprobs) else None


# --- distributions ---


@dataclass(frozen=True, slots=True)
class DrawTest:
    """A chi-squared test. ``alarm``: the p below which it accuses."""

    name: str
    num_tokens: int
    statistic: float
    p: float
    alarm: float


def judge_draws(drawn: Iterable[tuple[str, int, Answer]]) -> list[DrawTest]:
    """Tests of all texts together and of each group that has tokens enough. ``drawn``: group, number and
    answer.

    A token's place is the probability of all tokens likelier than it plus a random part of its own. If
    tokens were drawn from the distributions that their log-probabilities tell, places are uniform between
    0 and 1, whatever these distributions are, and independent of those before. So neighbours make pairs
    that fall into equal squares equally often: a draft that stands too often moves places to one side, a
    draw used twice ties neighbours together.
    """
    groups: dict[str, list[int]] = {"all": []}
    for name, number, answer in drawn:
        bins = _bins(number, answer)
        squares = [_NUM_BINS * one + two for one, two in zip(bins[::2], bins[1::2], strict=False)]
        groups["all"] += squares
        groups.setdefault(name, []).extend(squares)
    tested = {name: each for name, each in groups.items() if len(each) >= _FEWEST_PAIRS}
    found = []
    for name, squares in tested.items():
        expected = len(squares) / (FREEDOM + 1)
        counts = [squares.count(square) for square in range(FREEDOM + 1)]
        statistic = sum((count - expected) ** 2 / expected for count in counts)
        p, alarm = chi_squared_tail(statistic), FALSE_ALARMS / len(tested)
        found.append(DrawTest(name, 2 * len(squares), statistic, p, alarm))
    return found


def _bins(number: int, answer: Answer) -> list[int]:
    """In which part of the unit interval each token's place lies."""
    rng = random.Random(number)
    found = []
    for value, top in answer.logprobs or ():
        likelier = sum(math.exp(each) for each in top.values() if each > value)
        mass = math.exp(value) * sum(each == value for each in top.values())
        if len(top) > TOP_LOGPROBS:  # The token is none of the likeliest: anywhere behind them.
            mass = 1 - likelier
        found.append(min(int((likelier + rng.random() * mass) * _NUM_BINS), _NUM_BINS - 1))
    return found


def chi_squared_tail(statistic: float) -> float:
    """The probability of a statistic at least as large, at 15 degrees of freedom."""
    half = statistic / 2
    term, found = math.exp(-half) * math.sqrt(half) / math.gamma(1.5), math.erfc(math.sqrt(half))
    for step in range(1, (FREEDOM + 1) // 2):
        found += term
        term *= half / (step + 0.5)
    return found
