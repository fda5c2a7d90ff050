"""The requests of ``slipstream prove``: which texts are written twice, under what circumstances, and
which are drawn so that their distribution can be tested. A seed says all of it.

A case is a request without a word on drafts. Its kind, prompt, sampling and log-probabilities go round
in cycles of 7, 5, 4 and 3, which have no factor in common, so that few cases hold much and many hold
every combination. A trial asks for a case's text once more.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from slipstream.client.bench import builtin_prompts

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PLAIN: Mapping[str, Any] = {"draft_strategy": "none"}
TOP_LOGPROBS = 20
_FEW_LOGPROBS = 3
_NUM_TRIALS = 8
"""Trials per case."""
_ALONE = 9
"""One trial of so many is alone: no factor in common with their number."""
_DRAWN = 8
"""One request of so many is drawn by rejection, where the server has that."""
_GRAMMAR = "grammar"
"""The drafter that may only be named where something constrains the output."""
_MAX_TOKENS, _NUM_DRAWN_TOKENS = 32, 48
_GAMMA = 6

_SENTENCES = (
    "The lighthouse keeper climbed the stairs every evening, lit the lamp and wrote the weather down.",
    "In winter the waves reached the windows, and the ships kept far away from the rocks.",
    "One night the lamp went out, and a boat from the village came too close to the shore.",
    "The keeper rang the bell until his hands hurt, and the crew heard it and turned the boat.",
)
_LANGUAGES = (
    "Der Leuchtturmwärter stieg jeden Abend die Treppe hinauf und zündete die Lampe an. Im Winter ",
    "Le gardien du phare montait l'escalier chaque soir et allumait la lampe. En hiver, ",
    "灯塔看守人每天晚上爬上楼梯，点亮灯，并把天气写在本子里。冬天",
)
_CODE = tuple(each.fields["prompt"] for each in builtin_prompts() if "prompt" in each.fields)
_PROMPTS = ("prose", "repetitive", "code", "long", "other languages")
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["ship", "lamp", "bell"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}
_Fields = Mapping[str, Any]
_KINDS: Mapping[str, tuple[_Fields, _Fields]] = {
    "text": ({}, {}),
    # Among few tokens penalties soon have all about equal, so that every one decides what comes next.
    "penalties": (
        {"frequency_penalty": 0.4, "presence_penalty": 0.4},
        {"repetition_penalty": 1.1, "allowed_token_ids": list(range(40, 48))},
    ),
    "chat": ({}, {}),
    "stop strings": ({"stop": ["\n\n", " and", "six, s", "self."]}, {}),
    "schema": ({"response_format": _FORMAT}, {}),
    "truncation": ({"top_p": 0.9}, {"top_k": 40, "min_p": 0.02}),
    "bias": ({"logit_bias": {"17": -2, "28": 2}}, {"bad_words": [" the"], "min_tokens": 8}),
}
"""Fields that every OpenAI-compatible server accepts, and fields for Slipstream only."""
_TEMPERATURES = (0.0, 0.7, 0.0, 1.0)


class Offer(NamedTuple):
    """``catalogue``: ``GET /v1/drafters``, None where the server is not Slipstream."""

    catalogue: Mapping[str, Any] | None = None
    has_chats: bool = True


class Case(NamedTuple):
    """``labels``: what it is one of, for the account."""

    number: int
    path: str
    fields: _Fields
    labels: Mapping[str, str]


class Arm(NamedTuple):
    """``speculative``: the object of that name, None for servers that read none."""

    labels: Mapping[str, str] = {}
    speculative: _Fields | None = None
    takes_prediction: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """``cache``: its name, where the server has that. Every second trial of a case has the same, so that
    it may find its prompt there."""

    number: int
    case: Case
    arm: Arm
    is_alone: bool
    cache: str

    @property
    def labels(self) -> dict[str, str]:
        company = "alone" if self.is_alone else "in company"
        return {**self.case.labels, **self.arm.labels, "company": company}

    def fields(self, text: str = "") -> dict[str, Any]:
        """Returns the request's fields. ``text``: the case's text without drafts; most of it becomes
        the prediction if an arm reads one."""
        found = with_drafts(self.case.fields, self.arm.speculative, self.cache)
        guess = text[: len(text) // 3] + text[len(text) // 3 + 8 :]
        is_told = self.arm.takes_prediction and guess
        return found | ({"prediction": {"type": "content", "content": guess}} if is_told else {})


class Plan(NamedTuple):
    """``trials`` are compared with their cases' texts without drafts; ``drawn`` are tested by
    themselves."""

    cases: Sequence[Case]
    trials: Sequence[Trial]
    drawn: Sequence[Trial]


def with_drafts(fields: _Fields, speculative: _Fields | None, cache: str) -> dict[str, Any]:
    own = {} if speculative is None else {"speculative": dict(speculative), "cache_salt": cache}
    return {**fields, **own}


def make_plan(offer: Offer, num_requests: int, seed: int, run_id: str) -> Plan:
    """``num_requests`` trials, a share of them drawn. ``run_id`` keeps the caches of two runs apart."""
    rng = random.Random(seed)
    arms, drawing = ([Arm()], []) if offer.catalogue is None else _arms(offer.catalogue)
    num_drawn = num_requests // _DRAWN if drawing else 0
    num_compared = num_requests - num_drawn
    cases = [_case(offer, number, rng) for number in range(-(-num_compared // _NUM_TRIALS))]
    free = _rounds([each for each in arms if each.labels.get("drafter") != _GRAMMAR], rng)
    bound = _rounds([each for each in arms if each.labels.get("drafter") == _GRAMMAR], rng)
    trials = []
    for number in range(num_compared):
        case, at = cases[number // _NUM_TRIALS], number % _NUM_TRIALS
        is_bound = case.labels["kind"] == "schema" and at == 0
        arm = (next(bound, None) if is_bound else None) or next(free)
        cache = f"{run_id}-{case.number}-{'again' if at % 2 else at}"
        trials.append(Trial(number, case, arm, number % _ALONE == 2, cache))
    drawn = [
        Trial(num_compared + at, _drawn_case(at, rng), arm, False, f"{run_id}-drawn-{at}")
        for at, arm in zip(range(num_drawn), _rounds(drawing, rng), strict=False)
    ]
    return Plan(cases, trials, drawn)


def _rounds(arms: Sequence[Arm], rng: random.Random) -> Iterator[Arm]:
    """All arms, in another order every time."""
    while arms:
        yield from rng.sample(arms, len(arms))


def _case(offer: Offer, number: int, rng: random.Random) -> Case:
    kind = tuple(_KINDS)[number % len(_KINDS)]
    temperature = _TEMPERATURES[number % len(_TEMPERATURES)]
    prompt = _PROMPTS[number % len(_PROMPTS)]
    is_own = offer.catalogue is not None
    is_chat = kind in ("chat", "schema") and offer.has_chats
    text = _text(prompt, rng)
    said = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    fields: dict[str, Any] = {**said}
    for each in _KINDS[kind] if is_own else _KINDS[kind][:1]:
        fields |= each
    fields |= {"max_tokens": _MAX_TOKENS, "temperature": temperature, "seed": rng.getrandbits(31)}
    has_logprobs = number % 3 != 2
    if has_logprobs:
        asked = {"logprobs": True, "top_logprobs": _FEW_LOGPROBS}
        fields |= asked if is_chat else {"logprobs": _FEW_LOGPROBS}
    labels = {
        "kind": kind,
        "prompt": prompt,
        "sampling": f"temperature {temperature:g}" if temperature else "greedy",
        "log-probabilities": "asked for" if has_logprobs else "not asked for",
    }
    return Case(number, CHATS if is_chat else COMPLETIONS, fields, labels)


def _drawn_case(number: int, rng: random.Random) -> Case:
    """Drawn from the whole distribution, which is that of the log-probabilities told. The token that ends
    a text is not told, so none may end it."""
    fields = {
        "prompt": _text(_PROMPTS[number % len(_PROMPTS)], rng),
        **{"max_tokens": _NUM_DRAWN_TOKENS, "temperature": 1.0, "seed": rng.getrandbits(31)},
        **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True},
        **{"logprobs": TOP_LOGPROBS, "return_tokens_as_token_ids": True},
    }
    return Case(number, COMPLETIONS, fields, {})


def _text(name: str, rng: random.Random) -> str:
    """A prompt that another call hardly gives again."""
    number = rng.randrange(1000)
    if name == "code":
        return f"# {number}\n{rng.choice(_CODE)}"
    if name == "repetitive":
        return f"{number}: " + "one, two, three, four, five, six, seven, eight, " * rng.randint(
            2, 4
        )
    if name == "other languages":
        return f"{number}. {rng.choice(_LANGUAGES)}"
    sentences = rng.choices(_SENTENCES, k=12 if name == "long" else 2)
    return f"{number}. {' '.join(sentences)} The"


def _arms(catalogue: Mapping[str, Any]) -> tuple[list[Arm], list[Arm]]:
    """Every drafter in a chain and, if it has them, a tree of fixed size, and under every other policy;
    and no drafts, since company and caches may not change a text either. Then what is drawn otherwise
    than by matching."""
    caps = catalogue["caps"]
    most = caps["max_speculative_tokens"]
    chain = {"adaptive_depth": "fixed", "num_speculative_tokens": min(_GAMMA, most)}
    tree = {**chain, "num_speculative_tokens": min(2 * _GAMMA, most), "tree_strategy": "tree"}
    tree |= {
        "tree_width": min(3, caps["max_tree_width"]),
        "tree_depth": min(5, caps["max_tree_depth"]),
    }
    fixed = {"chain": {**chain, "tree_strategy": "linear"}, "tree": tree}
    policies = {each: {"adaptive_depth": each} for each in catalogue["policies"] if each != "fixed"}
    found: dict[bool, list[Arm]] = {True: [Arm({"drafter": "none"}, PLAIN)], False: []}
    shapes = (fixed | policies).items()
    for card, way, (name, shape) in product(catalogue["data"], catalogue["verifications"], shapes):
        is_match = way == "match"
        has_shape = card["drafts_trees"] and way != "block" if name == "tree" else True
        has_way = is_match or (card["draws"] and name in fixed)
        if card["id"] != "none" and has_shape and has_way:
            labels = {"drafter": card["id"], "drafts": name if is_match else f"{way}, {name}"}
            speculative = {**shape, "draft_strategy": card["id"], "verification": way}
            found[is_match].append(Arm(labels, speculative, card["takes_prediction"]))
    return found[True], found[False]
