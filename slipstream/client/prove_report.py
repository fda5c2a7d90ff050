"""What ``slipstream prove`` found: as Markdown, which a terminal shows as it is, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.client.markdown import markdown_table
from slipstream.client.prove_answers import FALSE_ALARMS, FREEDOM, Answer, Difference, DrawTest
from slipstream.client.prove_plan import Trial

SCHEMA_VERSION = 1
_NUM_SHOWN = 20
_NEAR_TIE = 0.05
"""The most, in natural logarithms, that two tokens' probabilities are apart where rounding decides."""
_HEADER = ("", "", "texts", "equal", "with log-probabilities", "drafts accepted")


@dataclass(frozen=True, slots=True)
class Compared:
    """A trial's answer, and where it parts from its case's text without drafts."""

    trial: Trial
    answer: Answer
    difference: Difference | None

    @property
    def is_equal_text(self) -> bool:
        return self.difference is None or self.difference.what == "log-probabilities"

    @property
    def labels(self) -> dict[str, str]:
        cached = "some of the prompt" if self.answer.num_cached else "nothing"
        return {**self.trial.labels, "cached": cached}


@dataclass(frozen=True, slots=True)
class Proof:
    """``about``: the run. ``card``: of the model, as the server tells it. ``is_exact``: whether equal
    bits are promised. ``refused``: requests that were not answered, by reason."""

    about: Mapping[str, Any]
    card: Mapping[str, Any]
    is_exact: bool
    compared: Sequence[Compared]
    draws: Sequence[DrawTest]
    refused: Counter[str]

    @property
    def differing(self) -> list[Compared]:
        return [each for each in self.compared if each.difference is not None]

    @property
    def broken(self) -> list[str]:
        """The promises that were not kept."""
        found = [
            f"verification ({each.name}): tokens are drawn otherwise than reported, p = {each.p:.1e}"
            for each in self.draws
            if each.p < each.alarm
        ]
        if self.is_exact and (differing := len(self.differing)):
            found.append(f"determinism: {differing} of {len(self.compared)} answers differ")
        return found


def to_markdown(proof: Proof) -> str:
    about, compared = proof.about, proof.compared
    promise = f"`determinism` {proof.card.get('determinism')}, `exact_verified` "
    promise += f"{proof.card.get('exact_verified')}" if proof.is_exact else ""
    lines = [
        f"# Proof of {proof.card.get('id')} at {about['url']}\n",
        f"{about['date']}, seed {about['seed']}, compared with {about['reference']}. "
        f"Promise of equal texts: {promise if proof.is_exact else 'none'}.\n",
        f"**{sum(each.is_equal_text for each in compared)} of {len(compared)} texts equal**, "
        f"{len(compared) - len(proof.differing)} with their log-probabilities.",
        *(f"Not kept: {each}" for each in proof.broken),
        f"\n{_table(compared)}",
    ]
    if proof.differing:
        lines += ["\nDifferences, first what was written without drafts:\n", *_differences(proof)]
    if proof.draws:
        lines += [f"\n{_draws(proof.draws)}"]
    if proof.refused:
        told = [f"- {count}: {reason}" for reason, count in proof.refused.most_common()]
        lines += ["\nNot answered:\n", *told]
    return "\n".join(lines)


def _table(compared: Sequence[Compared]) -> str:
    kinds: dict[tuple[str, str], list[Compared]] = {}
    for each in compared:
        for kind in each.labels.items():
            kinds.setdefault(kind, []).append(each)
    order = list(dict.fromkeys(name for name, _ in kinds))
    rows = [
        (
            *kind,
            str(len(own)),
            str(sum(each.is_equal_text for each in own)),
            str(sum(each.difference is None for each in own)),
            str(sum(each.answer.num_accepted for each in own)),
        )
        for kind, own in sorted(kinds.items(), key=lambda each: (order.index(each[0][0]), each[0]))
    ]
    return markdown_table([_HEADER, *rows], num_text_columns=2)


def _differences(proof: Proof) -> list[str]:
    differing = proof.differing
    lines = [_line(each, each.difference) for each in differing[:_NUM_SHOWN] if each.difference]
    if len(differing) > _NUM_SHOWN:
        lines.append(f"- {len(differing) - _NUM_SHOWN} more: --json FILE has all of them")
    gaps = [
        abs(found.plain_logprob - found.written_logprob)
        for each in differing
        if (found := each.difference) is not None and found.what == "text"
        if found.plain_logprob is not None and found.written_logprob is not None
    ]
    if gaps:
        near = sum(gap < _NEAR_TIE for gap in gaps)
        lines.append(
            f"\nNear-ties, within {_NEAR_TIE}: {near} of the {len(gaps)} whose tokens are told."
        )
    return lines


def _line(each: Compared, found: Difference) -> str:
    place = f"character {found.character}" if found.token is None else f"token {found.token}"
    shown = [
        f"{text!r}" + ("" if value is None else f" ({value:.6f})")
        for text, value in (
            (found.plain, found.plain_logprob),
            (found.written, found.written_logprob),
        )
    ]
    words = ", ".join(value for name, value in each.labels.items() if name != "log-probabilities")
    return f"- request {each.trial.number} ({words}): {found.what}, {place}: {', '.join(shown)}"


def _draws(draws: Sequence[DrawTest]) -> str:
    rows = [
        (
            each.name,
            f"{each.num_tokens}",
            f"{each.statistic:.1f}",
            f"{each.p:.2g}",
            f"{each.alarm:.1e}",
        )
        for each in draws
    ]
    header = ("drawn by rejection", "tokens", "chi-squared", "p", "alarm below")
    return (
        f"{markdown_table([header, *rows], num_text_columns=1)}\n\n"
        f"Tokens' places in the distributions that the server reports, neighbours in pairs, {FREEDOM} "
        f"degrees of freedom; a server that draws as it should is accused by any of these tests with a "
        f"probability of {FALSE_ALARMS:.0e}."
    )


def to_json(proof: Proof) -> dict[str, Any]:
    return {
        "schema": SCHEMA_VERSION,
        **proof.about,
        "model": dict(proof.card),
        "is_exact": proof.is_exact,
        "not_kept": proof.broken,
        "num_compared": len(proof.compared),
        "num_equal_texts": sum(each.is_equal_text for each in proof.compared),
        "num_equal": len(proof.compared) - len(proof.differing),
        "draws": [asdict(each) for each in proof.draws],
        "not_answered": dict(proof.refused),
        "requests": [
            {
                "number": each.trial.number,
                **each.labels,
                "num_accepted_tokens": each.answer.num_accepted,
                "difference": None if each.difference is None else asdict(each.difference),
                "body": None if each.difference is None else each.trial.fields(),
            }
            for each in proof.compared
        ],
    }
