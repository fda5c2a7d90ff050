"""What ``slipstream prove`` found: as text, as Markdown, as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.client.markdown import markdown_table
from slipstream.client.prove_answers import FALSE_ALARMS, NUM_BINS, Answer, Difference, DrawTest
from slipstream.client.prove_plan import Trial

SCHEMA_VERSION = 1
_NUM_SHOWN = 20
_NEAR_TIE = 0.05
"""Natural logarithms: the usual gap between two tokens that rounding can change about."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A trial's answer, and where it parts from its case's without drafts."""

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
    """``card``: of the model, as the server tells it. ``exact``: whether it promises equal bits.
    ``refused``: requests that were not answered, by reason. ``about``: of the run."""

    about: Mapping[str, Any]
    card: Mapping[str, Any]
    exact: bool
    compared: Sequence[Compared]
    draws: Sequence[DrawTest]
    refused: Counter[str]

    @property
    def differing(self) -> list[Compared]:
        return [each for each in self.compared if each.difference is not None]

    @property
    def broken(self) -> list[str]:
        """The promises that were not kept."""
        found = []
        if self.exact and self.differing:
            found.append(
                f"determinism: exact - {len(self.differing)} of {len(self.compared)} differ"
            )
        found += [
            f"verification: {each.name} - tokens drawn otherwise than reported (p = {each.p:.1e})"
            for each in self.draws
            if not each.is_kept
        ]
        return found


def to_markdown(proof: Proof) -> str:
    """The whole report; what a terminal shows, too."""
    parts = [_head(proof), _verdict(proof)]
    if proof.compared:
        parts.append(_table(proof.compared))
    if proof.differing:
        parts.append(_differences(proof.differing))
    if proof.draws:
        parts.append(_draws(proof.draws))
    if proof.refused:
        lines = [f"- {count}: {reason}" for reason, count in proof.refused.most_common()]
        parts.append("Not answered:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _head(proof: Proof) -> str:
    promised = "exact" if proof.exact else "none"
    said = {key: proof.card[key] for key in ("determinism", "exact_verified") if key in proof.card}
    words = ", ".join(f"`{key}` {value}" for key, value in said.items())
    return (
        f"# Proof of {proof.card.get('id')} at {proof.about['url']}\n\n"
        f"{proof.about['date']}, seed {proof.about['seed']}, against {proof.about['reference']}. "
        f"Promise of equal bits: {promised}{f' ({words})' if words else ''}."
    )


def _verdict(proof: Proof) -> str:
    num_equal = sum(each.is_equal_text for each in proof.compared)
    lines = [f"**{num_equal} of {len(proof.compared)} texts equal**"]
    asked = [each for each in proof.compared if each.answer.logprobs is not None]
    if asked:
        num_same = sum(each.difference is None for each in asked)
        lines[0] += f"; log-probabilities equal to the bit in {num_same} of {len(asked)}"
    lines += [f"Not kept: {each}" for each in proof.broken]
    if not proof.broken:
        kept = proof.exact or proof.draws
        lines.append("Every promise was kept." if kept else "Nothing was promised.")
    return "\n".join(lines)


def _table(compared: Sequence[Compared]) -> str:
    names = dict.fromkeys(name for each in compared for name in each.labels)
    rows: list[tuple[str, ...]] = [("", "", "texts", "equal", "all equal", "drafts accepted")]
    for name in names:
        values = dict.fromkeys(each.labels[name] for each in compared if name in each.labels)
        for value in sorted(values):
            rows.append(_row(name, value, [x for x in compared if x.labels.get(name) == value]))
    return markdown_table(rows, num_text_columns=2)


def _row(name: str, value: str, own: Sequence[Compared]) -> tuple[str, ...]:
    num_texts = sum(each.is_equal_text for each in own)
    num_all = sum(each.difference is None for each in own)
    accepted = sum(each.answer.num_accepted for each in own)
    return name, value, *(str(count) for count in (len(own), num_texts, num_all, accepted))


def _differences(differing: Sequence[Compared]) -> str:
    lines = [_line(each) for each in differing[:_NUM_SHOWN]]
    if len(differing) > _NUM_SHOWN:
        lines.append(f"- ... and {len(differing) - _NUM_SHOWN} more (--json has all of them)")
    gaps = [gap for each in differing if (gap := _gap(each.difference)) is not None]
    if gaps:
        near = sum(gap < _NEAR_TIE for gap in gaps)
        lines.append(
            f"\nThe two tokens' log-probabilities without drafts were within {_NEAR_TIE} of each "
            f"other in {near} of {len(gaps)} of these."
        )
    return "Differences, the text without drafts first:\n\n" + "\n".join(lines)


def _gap(difference: Difference | None) -> float | None:
    if difference is None or difference.what != "text":
        return None
    if difference.plain_logprob is None or difference.written_logprob is None:
        return None
    return abs(difference.plain_logprob - difference.written_logprob)


def _line(each: Compared) -> str:
    found = each.difference
    assert found is not None
    place = f"character {found.character}" if found.token is None else f"token {found.token}"
    circumstances = ", ".join(value for name, value in each.labels.items() if name != "prompt")
    return (
        f"- request {each.trial.number} ({circumstances}), {found.what}, {place}: "
        f"{found.plain!r}{_told(found.plain_logprob)}, {found.written!r}{_told(found.written_logprob)}"
    )


def _told(value: float | None) -> str:
    return "" if value is None else f" ({value:.4f})"


def _draws(draws: Sequence[DrawTest]) -> str:
    rows = [("drawn tokens", "tokens", "chi-squared", "p", "alarm below")]
    rows += [
        (
            each.name,
            str(each.num_tokens),
            f"{each.statistic:.1f}",
            f"{each.p:.2g}",
            f"{each.alarm:.1e}",
        )
        for each in draws
    ]
    freedom = NUM_BINS**2 - 1
    return (
        f"{markdown_table(rows, num_text_columns=1)}\n\nTokens' places in the distributions that the "
        f"server reports, in neighbouring pairs, {freedom} degrees of freedom. A server that draws as "
        f"it should is accused with a probability of {FALSE_ALARMS:.0e} by any of these tests."
    )


def to_json(proof: Proof) -> dict[str, Any]:
    return {
        "schema": SCHEMA_VERSION,
        **proof.about,
        "model": dict(proof.card),
        "promises_exact": proof.exact,
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
                **({} if each.difference is None else {"body": each.trial.fields()}),
            }
            for each in proof.compared
        ],
    }
