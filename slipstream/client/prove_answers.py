"""What a server answered in ``slipstream prove``: whether two answers are one, where they part, and
whether tokens were drawn from the distribution that the server itself reports."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from slipstream.client.errors import ClientError
from slipstream.client.prove_plan import TOP_LOGPROBS

NUM_BINS = 4
"""Of the pairs' sides."""
FALSE_ALARMS = 1e-6
"""The probability that any of a run's tests accuses a server that draws as it should."""
_FEWEST_PAIRS = 5 * NUM_BINS**2
"""Below so many the statistic is not distributed as chi-squared is."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``tokens``: ids where the server tells them, else their texts; None where it tells neither.
    ``token_texts``: beside them. ``logprobs``: of each token its own log-probability and those of the
    likeliest, by name; None where none were asked for."""

    text: str
    finish_reason: str | None
    tokens: tuple[int | str, ...] | None
    token_texts: tuple[str, ...]
    logprobs: tuple[tuple[float, Mapping[str, float]], ...] | None
    num_accepted: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class Difference:
    """``what``: "text", "log-probabilities" or "end". ``token``: the index of the first token that
    differs, None where tokens are not told; then ``character`` says where the texts part. ``plain`` and
    ``written``: what stands there in the text without drafts and in the other."""

    what: str
    token: int | None
    character: int
    plain: str
    written: str
    plain_logprob: float | None = None
    written_logprob: float | None = None


def read_answer(found: Any) -> Answer:
    """Of completions or chats. Raises ClientError for what is neither."""
    try:
        choice, usage = found["choices"][0], found.get("usage") or {}
        text = choice["message"].get("content") if "message" in choice else choice["text"]
        told = _told_logprobs(choice.get("logprobs"))
        names = [name for name, _, _ in told or ()]
        own = [(each["id"], each["text"]) for each in choice.get("tokens") or ()]
        tokens = tuple(token_id for token_id, _ in own) or tuple(names)
        return Answer(
            text=text or "",
            finish_reason=choice.get("finish_reason"),
            tokens=tokens or (None if text else ()),
            token_texts=tuple(text for _, text in own) or tuple(names),
            logprobs=None if told is None else tuple((value, top) for _, value, top in told),
            num_accepted=(usage.get("speculative") or {}).get("num_accepted_tokens", 0),
            num_cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ClientError(
            "the answer is not in the form of OpenAI's completions; check the address"
        ) from error


def _told_logprobs(told: Any) -> list[tuple[str, float, dict[str, float]]] | None:
    """Each token's name, log-probability and the likeliest tokens': in the form of chats, which some
    servers give to completions, too, or in that of completions."""
    if not told:
        return None
    if told.get("content") is not None:
        return [
            (
                each["token"],
                each["logprob"],
                {top["token"]: top["logprob"] for top in each.get("top_logprobs") or ()},
            )
            for each in told["content"]
        ]
    tops = told.get("top_logprobs") or [{}] * len(told["tokens"])
    rows = zip(told["tokens"], told["token_logprobs"], tops, strict=True)
    return [(name, value, dict(top or {})) for name, value, top in rows]


def first_difference(plain: Answer, other: Answer) -> Difference | None:
    """None where text, end, tokens and log-probabilities are equal, these to the bit."""
    at = _parting_token(plain, other)
    if plain.text != other.text or at is not None:
        character = _parting(plain.text, other.text)
        part = len(plain.text) if character is None else character
        shown = _shown(plain, at, part), _shown(other, at, part)
        return Difference("text", at, part, *shown)
    if plain.finish_reason != other.finish_reason:
        ends = str(plain.finish_reason), str(other.finish_reason)
        return Difference("end", None, len(plain.text), *ends)
    if plain.logprobs is None or other.logprobs is None:
        return None
    at = _parting(plain.logprobs, other.logprobs)
    if at is None:
        return None
    return Difference(
        "log-probabilities",
        at,
        0,
        _shown(plain, at, 0),
        _shown(other, at, 0),
        _value(plain.logprobs, at),
        _value(other.logprobs, at),
    )


def _parting_token(plain: Answer, other: Answer) -> int | None:
    """None also where one of them does not tell its tokens, or tells them in another way."""
    if plain.tokens is None or other.tokens is None:
        return None
    is_one_way = len({type(each) for each in (*plain.tokens, *other.tokens)}) <= 1
    return _parting(plain.tokens, other.tokens) if is_one_way else None


def _parting(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    pairs = zip_longest(one, other, fillvalue=_Missing)
    return next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), None)


class _Missing:
    """Equals nothing that a server tells."""


def _shown(answer: Answer, token: int | None, character: int) -> str:
    if token is None:
        return answer.text[character : character + 12] or "(end)"
    return answer.token_texts[token] if token < len(answer.token_texts) else "(end)"


def _value(logprobs: Sequence[tuple[float, Any]], at: int) -> float | None:
    return logprobs[at][0] if at < len(logprobs) else None


# --- distributions ---


@dataclass(frozen=True, slots=True)
class DrawTest:
    """A chi-squared test. ``alarm``: the p below which it accuses."""

    name: str
    num_tokens: int
    statistic: float
    freedom: int
    p: float
    alarm: float

    @property
    def is_kept(self) -> bool:
        return self.p >= self.alarm


def judge_draws(drawn: Iterable[tuple[str, int, Answer]]) -> list[DrawTest]:
    """Tests of all texts together and of each group that has tokens enough. ``drawn``: group, number and
    answer.

    A token's place is the probability of all tokens likelier than it plus a random part of its own. If
    tokens were drawn from the distributions that their log-probabilities tell, places are uniform between
    0 and 1, whatever these distributions are, and independent of those before. So neighbours make pairs
    that fall into ``NUM_BINS`` x ``NUM_BINS`` squares equally often: a draft that stands too often moves
    places to one side, a draw used twice ties neighbours together.
    """
    groups: dict[str, list[tuple[float, float]]] = {"all": []}
    for name, number, answer in drawn:
        found = _places(number, answer)
        pairs = list(zip(found[::2], found[1::2], strict=False))
        groups["all"] += pairs
        groups.setdefault(name, []).extend(pairs)
    tested = {name: pairs for name, pairs in groups.items() if len(pairs) >= _FEWEST_PAIRS}
    return [_test(name, pairs, FALSE_ALARMS / len(tested)) for name, pairs in tested.items()]


def _places(number: int, answer: Answer) -> list[float]:
    rng = random.Random(number)
    found = []
    for value, top in answer.logprobs or ():
        likelier = sum(math.exp(each) for each in top.values() if each > value)
        mass = math.exp(value) * sum(each == value for each in top.values())
        if len(top) > TOP_LOGPROBS:  # The token is none of the likeliest: anywhere behind them.
            mass = 1 - likelier
        found.append(min(max(likelier + rng.random() * mass, 0.0), 1 - 1e-9))
    return found


def _test(name: str, pairs: Sequence[tuple[float, float]], alarm: float) -> DrawTest:
    counts = [0] * NUM_BINS**2
    for first, second in pairs:
        counts[int(first * NUM_BINS) * NUM_BINS + int(second * NUM_BINS)] += 1
    expected = len(pairs) / len(counts)
    statistic = sum((count - expected) ** 2 / expected for count in counts)
    freedom = len(counts) - 1
    p = chi_squared_tail(statistic, freedom)
    return DrawTest(name, 2 * len(pairs), statistic, freedom, p, alarm)


def chi_squared_tail(statistic: float, freedom: int) -> float:
    """The probability of a statistic at least as large, for an odd number of degrees of freedom."""
    half = statistic / 2
    term = math.exp(-half) * math.sqrt(half) / math.gamma(1.5)
    found = math.erfc(math.sqrt(half))
    for step in range(1, (freedom + 1) // 2):
        found += term
        term *= half / (step + 0.5)
    return found
