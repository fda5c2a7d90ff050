"""Synthesise edit samples: an instruction plus code, and the exact edited code.

Every edit is a deterministic text operation, so the right answer is known exactly.  A share
of the samples has its identifiers replaced by random ones: the answer then cannot be
recalled from training and has to be copied from the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from training import operations
from training.names import random_lines, scramble


@dataclass(frozen=True)
class Edit:
    """One edit sample; `kind` names the operation."""

    kind: str
    instruction: str
    before: str
    after: str


Maker = Callable[[random.Random, str], "tuple[str, str] | None"]

KINDS: dict[str, tuple[Maker, float]] = {
    "rename_function": (operations.rename_function, 3.0),
    "rename_class": (operations.rename_class, 1.5),
    "rename_parameter": (operations.rename_parameter, 3.0),
    "rename_variable": (operations.rename_variable, 3.0),
    "rename_attribute": (operations.rename_attribute, 1.5),
    "rename_any": (operations.rename_any, 2.5),
    "rename_two": (operations.rename_two, 1.0),
    "replace_string": (operations.replace_string, 2.0),
    "replace_number": (operations.replace_number, 1.5),
    "remove_comments": (operations.remove_comments, 1.5),
    "remove_docstring": (operations.remove_docstring, 1.0),
    "add_docstring": (operations.add_docstring, 1.5),
    "change_quotes": (operations.change_quotes, 1.0),
    "repeat": (operations.repeat, 2.0),
    "insert_line": (operations.insert_line, 2.0),
    "delete_line": (operations.delete_line, 1.0),
    "replace_line": (operations.replace_line, 1.5),
    "add_first_line": (operations.add_first_line, 1.0),
    "add_parameter": (operations.add_parameter, 1.0),
}


def make_edit(rng: random.Random, text: str, repeat_share: float = 0.0) -> Edit:
    """Apply one random operation that fits the text; falls back to repeating it."""
    names, weights = list(KINDS), [w for _, w in KINDS.values()]
    for _ in range(12):
        kind = "repeat" if rng.random() < repeat_share else rng.choices(names, weights)[0]
        done = KINDS[kind][0](rng, text)
        if done is not None and (done[1] != text or kind == "repeat"):
            return Edit(kind, done[0], text, done[1])
    say, after = operations.repeat(rng, text) or ("", text)
    return Edit("repeat", say, text, after)


def user_content(rng: random.Random, edit: Edit, plain: bool = False) -> str:
    """Lay out instruction and code; mostly instruction first, sometimes after the code."""
    code = edit.before.strip("\n")
    if not plain and rng.random() < 0.12:
        return f"{code}\n\n{edit.instruction}"
    gap = "\n\n" if plain or rng.random() < 0.8 else "\n"
    return f"{edit.instruction}{gap}{code}"


def base_text(rng: random.Random, units: Sequence[str], longest: int, random_share: float) -> str:
    """Draw the code to edit: one unit or several joined, at most `longest` characters."""
    if rng.random() < 0.05 + 0.3 * random_share:
        return random_lines(rng)
    goal = rng.uniform(0.1, 1.0) * longest
    parts: list[str] = []
    for _ in range(12):
        unit = rng.choice(units)
        if sum(map(len, parts)) + len(unit) <= max(goal, 150):
            parts.append(unit)
        if parts and (sum(map(len, parts)) > 0.6 * goal or rng.random() < 0.2):
            break
    text = "\n\n".join(parts) if parts else random_lines(rng)
    if rng.random() < random_share:
        text = scramble(rng, text, rng.uniform(0.3, 1.0))
    return text
