"""Random identifiers, and renaming whole words in code."""

from __future__ import annotations

import builtins
import keyword
import random
import re

NAME = re.compile(r"(?<![\w\\])[A-Za-z_][A-Za-z0-9_]*")
KEEP = set(keyword.kwlist) | set(dir(builtins)) | {"self", "cls", "match", "case", "type"}

_WORD_TEXT = """
get set load save read write open close parse format build make create update delete remove add
insert append find search match filter sort merge split join count total sum mean value item key
name path file line text data node tree list table row column index size length width height
start stop begin end first last next prev left right up down user account order price cost
amount rate score level state status flag mode type kind class group member team event message
error result reply request response client server host port url address token word letter char
byte block chunk page buffer queue stack cache pool worker task job step phase time date day
hour minute second year month color shape point edge angle matrix vector field record entry
option config setting param arg input output source target origin limit offset weight scale
factor ratio delta alpha beta gamma check test validate verify compute calculate convert encode
decode render draw print show hide send receive push pull fetch store apply run call invoke
handle process clean reset init setup new old raw full empty valid active current default max
min best worst temp tmp base root parent child owner label title note summary report city street
country book author ticket invoice payment product cart stock
"""
WORDS = [word for word in _WORD_TEXT.split() if word not in KEEP]


def random_name(rng: random.Random, style: str = "snake") -> str:
    """Make up an identifier; about a third are meaningless letters."""
    if rng.random() < 0.3:
        parts = [
            "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 6)))
            for _ in range(rng.randint(1, 2))
        ]
    else:
        parts = rng.sample(WORDS, rng.choice((1, 2, 2, 2, 3)))
    if style == "class":
        return "".join(p.capitalize() for p in parts)
    if style == "const":
        return "_".join(parts).upper()
    name = "_".join(parts)
    if rng.random() < 0.08:
        name += str(rng.randint(1, 99))
    return name if name not in KEEP else name + "_x"


def name_like(rng: random.Random, old: str, taken: str) -> str:
    """Make up an identifier in the style of an old one that does not occur in the text."""
    style = "snake"
    if old.isupper() and len(old) > 1:
        style = "const"
    elif old[:1].isupper():
        style = "class"
    for _ in range(20):
        new = random_name(rng, style)
        if not re.search(rf"\b{re.escape(new)}\b", taken):
            return ("_" + new) if old.startswith("_") and rng.random() < 0.7 else new
    return random_name(rng, style) + "_q"


def replace_word(text: str, old: str, new: str) -> str:
    """Replace whole-word occurrences only."""
    return re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", lambda _: new, text)


def identifiers(text: str) -> list[str]:
    """Return the identifiers of a text that may be renamed, most frequent first."""
    counts: dict[str, int] = {}
    for found in NAME.findall(text):
        if found not in KEEP and not found.startswith("__") and len(found) > 1:
            counts[found] = counts.get(found, 0) + 1
    return sorted(counts, key=lambda n: -counts[n])


def scramble(rng: random.Random, text: str, share: float) -> str:
    """Replace a share of the identifiers of a text by random ones, consistently."""
    table = {n: name_like(rng, n, text) for n in identifiers(text) if rng.random() < share}
    return NAME.sub(lambda m: table.get(m.group(), m.group()), text)


def random_lines(rng: random.Random) -> str:
    """Make short texts of random assignments and calls: pure copying practice."""
    out = []
    for _ in range(rng.randint(3, 14)):
        a, b, c = (random_name(rng) for _ in range(3))
        out.append(
            rng.choice(
                (
                    f"{a} = {rng.randint(0, 999)}",
                    f"{a} = {b}({c})",
                    f"{a}.{b} = {c}",
                    f'{a} = "{b} {c}"',
                    f"def {a}({b}, {c}):\n    return {b}",
                    f"{a}({b}, {c})",
                    f"if {a}:\n    {b} = {c}",
                    f"for {a} in {b}:\n    {c}({a})",
                    f"import {a}",
                    f"{a} = [{b}, {c}]",
                    f'{a}["{b}"] = {c}',
                )
            )
        )
    return "\n".join(out) + "\n"
