"""The requests of ``slipstream prove``: which texts are written twice, under what circumstances, and
which are drawn so that their distribution can be tested. A seed says all of it.

A case is a request without a word on drafts. Its kind, prompt, sampling and log-probabilities go round in
cycles of 7, 5, 4 and 3, which have no factor in common, so that few cases hold much and many hold every
combination. A trial is one more request for a case's text: with an arm's drafts, alone or in company,
with a cache of its own or one that holds its prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from slipstream.client.bench import builtin_prompts

NUM_TRIALS = 8
"""Of each case."""
_ALONE = 9
"""One trial of so many is alone. With ``NUM_TRIALS`` it has no factor in common."""
DRAWN_SHARE = 8
"""One request of so many is drawn by rejection, where the server has that."""
TOP_LOGPROBS = 20
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PLAIN = "none"
_GRAMMAR = "grammar"
"""The drafter that a request may only name where something constrains its output."""
_MAX_TOKENS = 32
_NUM_DRAWN_TOKENS = 48
_GAMMA, _WIDTH, _DEPTH = 6, 3, 5
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
    "Смотритель маяка каждый вечер поднимался по лестнице и зажигал лампу. Зимой ",
)
_LIST = "one, two, three, four, five, six, seven, eight, "
_CODE = tuple(each.fields["prompt"] for each in builtin_prompts() if "prompt" in each.fields)
_PROMPTS = ("prose", "repetitive", "code", "long", "other languages")
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["ship", "lamp", "bell"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "text": {},
    "penalties": {"frequency_penalty": 0.4, "presence_penalty": 0.2},
    "chat": {},
    "stop strings": {"stop": ["\n\n", " and", "six, s", "self."]},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": _SCHEMA, "strict": True},
        }
    },
    "truncation": {"top_p": 0.9},
    "bias": {"logit_bias": {"17": -2, "28": 2, "260": 1}},
}
_OWN_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "penalties": {"repetition_penalty": 1.1},
    "truncation": {"top_k": 40, "min_p": 0.02},
    "bias": {"bad_words": [" the"], "min_tokens": 8},
}
"""Beside those that every server of OpenAI's API takes."""
_TEMPERATURES = (0.0, 0.7, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Server:
    """What a server offers to be asked for. ``catalogue``: ``GET /v1/drafters``, None where the server is
    not Slipstream. ``num_logprobs``: the most that it tells of a token; 0 where it tells none."""

    catalogue: Mapping[str, Any] | None = None
    has_chats: bool = True
    num_logprobs: int = TOP_LOGPROBS


@dataclass(frozen=True, slots=True)
class Case:
    """``labels``: what it is one of, for the account."""

    number: int
    path: str
    fields: Mapping[str, Any]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Arm:
    """``speculative``: the object of that name, None for servers that read none. ``takes_prediction``:
    drafts from a text that comes with the request."""

    labels: Mapping[str, str] = field(default_factory=dict)
    speculative: Mapping[str, Any] | None = None
    takes_prediction: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """``salt``: names the cache; None where the server has no such thing."""

    number: int
    case: Case
    arm: Arm
    is_alone: bool
    salt: str | None

    @property
    def labels(self) -> dict[str, str]:
        company = "alone" if self.is_alone else "in company"
        return {**self.case.labels, **self.arm.labels, "company": company}

    def fields(self, text: str = "") -> dict[str, Any]:
        """``text``: the case's without drafts. Most of it is predicted to drafters that read that."""
        found = with_drafts(self.case, self.arm.speculative, self.salt)
        third = len(text) // 3
        guess = text[:third] + text[third + 8 :]
        if self.arm.takes_prediction and guess:
            found["prediction"] = {"type": "content", "content": guess}
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """``trials`` are compared with their cases' texts without drafts; ``drawn`` tell by their
    log-probabilities whether they were drawn as they should be."""

    cases: Sequence[Case]
    trials: Sequence[Trial]
    drawn: Sequence[Trial]


def with_drafts(
    case: Case, speculative: Mapping[str, Any] | None, salt: str | None
) -> dict[str, Any]:
    own = {} if speculative is None else {"speculative": dict(speculative)}
    return {**case.fields, **own} | ({} if salt is None else {"cache_salt": salt})


def make_plan(server: Server, num_requests: int, seed: int, run_id: str) -> Plan:
    """``num_requests`` trials of the cases that takes, a share of them drawn. ``run_id`` keeps the caches
    of two runs apart."""
    rng = random.Random(seed)
    drawing = _drawing_arms(server.catalogue)
    num_drawn = num_requests // DRAWN_SHARE if drawing else 0
    num_compared = num_requests - num_drawn
    cases = [_case(server, number, rng) for number in range(-(-num_compared // NUM_TRIALS))]
    all_arms = _arms(server.catalogue)
    free = _rounds([each for each in all_arms if each.labels.get("drafter") != _GRAMMAR], rng)
    bound = _rounds([each for each in all_arms if each.labels.get("drafter") == _GRAMMAR], rng)
    trials = []
    for at in range(num_compared):
        case = cases[at // NUM_TRIALS]
        is_bound = case.labels["kind"] == "schema" and at % NUM_TRIALS == 0
        arm = next(bound, None) if is_bound else None
        trials.append(_trial(server, at, case, arm or next(free), run_id))
    drawn_cases = (_drawn_case(number, rng) for number in range(num_drawn))
    drawn = [
        Trial(num_compared + at, case, arm, False, f"{run_id}-drawn-{at}")
        for at, (case, arm) in enumerate(zip(drawn_cases, _rounds(drawing, rng), strict=False))
    ]
    return Plan(cases, trials, drawn)


def _rounds(arms: Sequence[Arm], rng: random.Random) -> Iterator[Arm]:
    """All arms, in another order every time."""
    while arms:
        yield from rng.sample(arms, len(arms))


def _trial(server: Server, number: int, case: Case, arm: Arm, run_id: str) -> Trial:
    at = number % NUM_TRIALS
    place = "again" if at % 2 else str(at)
    salt = None if server.catalogue is None else f"{run_id}-{case.number}-{place}"
    return Trial(number, case, arm, number % _ALONE == 2, salt)


# --- cases ---


def _case(server: Server, number: int, rng: random.Random) -> Case:
    kind = tuple(_KINDS)[number % len(_KINDS)]
    temperature = _TEMPERATURES[number % len(_TEMPERATURES)]
    is_own = server.catalogue is not None
    is_chat = kind in ("chat", "schema") and server.has_chats
    name = _PROMPTS[number % len(_PROMPTS)]
    fields = {
        **_prompt(_text(name, rng), is_chat),
        **_KINDS[kind],
        "max_tokens": _MAX_TOKENS,
        "temperature": temperature,
        "seed": rng.randrange(1 << 31),
    }
    if is_own:
        fields |= {**_OWN_FIELDS.get(kind, {}), "return_token_ids": True}
    # Those who name their tokens only beside log-probabilities are asked for them every time.
    has_logprobs = bool(server.num_logprobs) and (not is_own or number % 3 != 2)
    if has_logprobs:
        fields |= logprobs_fields(is_chat, min(3, server.num_logprobs))
    labels = {
        "kind": kind,
        "prompt": name,
        "sampling": f"temperature {temperature:g}" if temperature else "greedy",
        "log-probabilities": "asked for" if has_logprobs else "not asked for",
    }
    return Case(number, CHATS if is_chat else COMPLETIONS, fields, labels)


def _prompt(text: str, is_chat: bool) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}


def logprobs_fields(is_chat: bool, count: int) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": count} if is_chat else {"logprobs": count}


def _text(name: str, rng: random.Random) -> str:
    """A prompt that another call hardly gives again."""
    if name == "code":
        return f"# {rng.randrange(1000)}\n{rng.choice(_CODE)}"
    if name == "repetitive":
        return _LIST * rng.randint(2, 4) + "one, " * rng.randint(0, 2)
    if name == "other languages":
        return f"{rng.randrange(1000)}. {rng.choice(_LANGUAGES)}"
    sentences = rng.choices(_SENTENCES, k=12 if name == "long" else 2)
    return f"{rng.randrange(1000)}. {' '.join(sentences)} The"


def _drawn_case(number: int, rng: random.Random) -> Case:
    """At temperature 1, from the whole distribution, which is that of the log-probabilities told. The
    token that ends a text is not told, so none may end it."""
    name = _PROMPTS[number % len(_PROMPTS)]
    fields = {
        **_prompt(_text(name, rng), False),
        **logprobs_fields(False, TOP_LOGPROBS),
        **{"max_tokens": _NUM_DRAWN_TOKENS, "temperature": 1.0, "seed": rng.randrange(1 << 31)},
        **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
        **{"ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True},
    }
    return Case(number, COMPLETIONS, fields, {"prompt": name})


# --- arms ---


def _arms(catalogue: Mapping[str, Any] | None) -> list[Arm]:
    """Every drafter in a chain and, if it has them, a tree of fixed size, and under every other policy;
    and no drafts, since company and caches may not change a text either."""
    if catalogue is None:
        return [Arm()]
    found = [Arm({"drafter": PLAIN}, {"draft_strategy": PLAIN})]
    shapes = {"chain": _chain(catalogue), "tree": _tree(catalogue)}
    shapes |= {name: {"adaptive_depth": name} for name in catalogue["policies"] if name != "fixed"}
    for card, (name, shape) in product(catalogue["data"], shapes.items()):
        if card["id"] != PLAIN and (name != "tree" or card["drafts_trees"]):
            found.append(_arm(card, name, shape))
    return found


def _drawing_arms(catalogue: Mapping[str, Any] | None) -> list[Arm]:
    if catalogue is None:
        return []
    chain, tree = _chain(catalogue), _tree(catalogue)
    return [
        _arm(card, f"{verification}, {name}", shape | {"verification": verification})
        for card, verification, (name, shape) in product(
            catalogue["data"], catalogue["verifications"], (("chain", chain), ("tree", tree))
        )
        if card["draws"]
        and verification != "match"
        and (name != "tree" or (card["drafts_trees"] and verification != "block"))
    ]


def _arm(card: Mapping[str, Any], shape: str, speculative: Mapping[str, Any]) -> Arm:
    return Arm(
        {"drafter": card["id"], "drafts": shape},
        {"draft_strategy": card["id"], **speculative},
        card["takes_prediction"],
    )


def _chain(catalogue: Mapping[str, Any]) -> dict[str, Any]:
    gamma = min(_GAMMA, catalogue["caps"]["max_speculative_tokens"])
    return {
        "adaptive_depth": "fixed",
        "num_speculative_tokens": gamma,
        "tree_strategy": "linear",
        "verification": "match",
    }


def _tree(catalogue: Mapping[str, Any]) -> dict[str, Any]:
    caps = catalogue["caps"]
    return _chain(catalogue) | {
        "num_speculative_tokens": min(2 * _GAMMA, caps["max_speculative_tokens"]),
        "tree_strategy": "tree",
        "tree_width": min(_WIDTH, caps["max_tree_width"]),
        "tree_depth": min(_DEPTH, caps["max_tree_depth"]),
    }
