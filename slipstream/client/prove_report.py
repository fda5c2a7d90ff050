"""Reports the results of ``slipstream prove``: as Markdown, which a terminal shows as it is, and as
JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from slipstream.client.markdown import markdown_table
from slipstream.client.prove_answers import FALSE_ALARMS, FREEDOM, Answer, Difference, DrawTest
from slipstream.client.prove_plan import Trial

_NUM_SHOWN = 20
_NEAR_TIE = 0.05
"""The most, in natural logarithms, that two tokens' probabilities are apart where rounding decides."""
_HEADER = ("", "", "texts", "equal", "with log-probabilities", "drafts accepted")
_DRAWS_HEADER = ("drawn by rejection", "tokens", "chi-squared", "p", "alarm below")


class Compared(NamedTuple):
    """A trial's answer, and where it parts from its case's text without drafts, ``plain``."""

    trial: Trial
    answer: Answer
    difference: Difference | None
    plain: str

    @property
    def labels(self) -> dict[str, str]:
        cached = "some of the prompt" if self.answer.num_cached else "nothing"
        return {**self.trial.labels, "cached": cached}


@dataclass(frozen=True, slots=True)
class Proof:
    """``about``: the run. ``card``: of the model, as the server tells it. ``is_exact``: whether equal
    bits are promised. ``refused``: requests that were not answered, by reason. ``ended``: what
    ended the run early, if anything did."""

    about: Mapping[str, Any]
    card: Mapping[str, Any]
    is_exact: bool
    compared: Sequence[Compared]
    draws: Sequence[DrawTest]
    refused: Counter[str]
    ended: str = ""

    @property
    def broken(self) -> list[str]:
        """The promises that were not kept."""
        found = [
            f"verification ({each.name}): tokens are drawn otherwise than reported, p = {each.p:.1e}"
            for each in self.draws
            if each.p < each.alarm
        ]
        count, _, num_equal, _ = _figures(self.compared)
        if self.is_exact and num_equal < count:
            found.append(f"determinism: {count - num_equal} of {count} answers differ")
        return found


def _figures(compared: Sequence[Compared]) -> tuple[int, int, int, int]:
    """How many there are, have equal texts, are equal with their log-probabilities; accepted drafts."""
    found = [each.difference.what if each.difference else "" for each in compared]
    num_equal = found.count("")
    num_accepted = sum(each.answer.num_accepted for each in compared)
    return len(found), num_equal + found.count("log-probabilities"), num_equal, num_accepted


def to_markdown(proof: Proof) -> str:
    about, compared, card = proof.about, proof.compared, proof.card
    promise = f"`determinism` exact, `exact_verified` {card.get('exact_verified')}"
    count, num_texts, num_equal, _ = _figures(compared)
    rows = [(*kind, *map(str, _figures(own))) for kind, own in _by_kind(compared).items()]
    lines = [
        f"# Proof of {card.get('id')} at {about['url']}\n",
        f"{about['date']}, seed {about['seed']}, compared with {about['reference']}. "
        f"Promise of equal texts: {promise if proof.is_exact else 'none'}.\n",
        f"**{num_texts} of {count} texts equal**, {num_equal} with their log-probabilities.",
        *([f"Ended early: {proof.ended}"] if proof.ended else []),
        *(f"Not kept: {each}" for each in proof.broken),
        f"\n{markdown_table([_HEADER, *rows], num_text_columns=2)}",
    ]
    if num_equal < count:
        lines += [
            "\nDifferences, first what was written without drafts:\n",
            *_differences(compared),
        ]
    if proof.draws:
        tests = [
            (
                each.name,
                str(each.num_tokens),
                *(f"{x:.2g}" for x in (each.statistic, each.p, each.alarm)),
            )
            for each in proof.draws
        ]
        lines += [
            f"\n{markdown_table([_DRAWS_HEADER, *tests], num_text_columns=1)}\n",
            "Tokens' places in the distributions that the server reports, neighbours in pairs, "
            f"{FREEDOM} degrees of freedom; a server that draws as it should is accused by any of "
            f"these tests with a probability of {FALSE_ALARMS:.0e}.",
        ]
    if proof.refused:
        told = [f"- {count}: {reason}" for reason, count in proof.refused.most_common()]
        lines += ["\nNot answered:\n", *told]
    return "\n".join(lines)


def _by_kind(compared: Sequence[Compared]) -> dict[tuple[str, str], list[Compared]]:
    """Each label and value with all that has it, labels in their order and values in the alphabet's."""
    names = dict.fromkeys(name for each in compared for name in each.labels)
    kinds = [
        (name, value)
        for name in names
        for value in sorted({each.labels[name] for each in compared if name in each.labels})
    ]
    return {kind: [each for each in compared if kind in each.labels.items()] for kind in kinds}


def _differences(compared: Sequence[Compared]) -> list[str]:
    differing = [(each, each.difference) for each in compared if each.difference is not None]
    lines = []
    for each, found in differing[:_NUM_SHOWN]:
        place = f"character {found.character}" if found.token is None else f"token {found.token}"
        words = ", ".join(each.labels.values())
        one, other = (
            _told(found.plain, found.plain_logprob),
            _told(found.written, found.written_logprob),
        )
        lines.append(f"- {each.trial.number} ({words}): {found.what}, {place}: {one}, {other}")
    if len(differing) > _NUM_SHOWN:
        lines.append(f"- {len(differing) - _NUM_SHOWN} more: --json FILE has all of them")
    gaps = [
        abs(found.plain_logprob - found.written_logprob)
        for _, found in differing
        if found.plain_logprob is not None and found.written_logprob is not None
    ]
    num_near = sum(gap < _NEAR_TIE for gap in gaps)
    return [*lines, f"\nNear-ties, within {_NEAR_TIE}: {num_near} of {len(gaps)} that tell both."]


def _told(text: str, value: float | None) -> str:
    return f"{text!r}" + ("" if value is None else f" ({value:.6f})")


def to_json(proof: Proof) -> dict[str, Any]:
    names = ("num_compared", "num_equal_texts", "num_equal", "num_accepted_tokens")
    return {
        **proof.about,
        "model": dict(proof.card),
        "is_exact": proof.is_exact,
        "not_kept": proof.broken,
        "ended_early": proof.ended or None,
        **dict(zip(names, _figures(proof.compared), strict=True)),
        "draws": [asdict(each) for each in proof.draws],
        "not_answered": dict(proof.refused),
        "requests": [
            {
                "number": each.trial.number,
                **each.labels,
                "num_accepted_tokens": each.answer.num_accepted,
                "difference": each.difference and asdict(each.difference),
                "body": each.difference and each.trial.fields(each.plain),
            }
            for each in proof.compared
        ],
    }
