"""The single edit operations.

Each takes code and returns the instruction that asks for the edit together with the edited
code, or None where the operation does not fit the code.
"""

from __future__ import annotations

import random
import re

from training.names import KEEP, WORDS, identifiers, name_like, random_name, replace_word

_PLAIN = r"([A-Za-z][\w .,:/-]{1,30})"
STRING = re.compile(rf"""(?<![\w'"\\])(?:"{_PLAIN}"|'{_PLAIN}')(?!["'])""")
NUMBER = re.compile(r"(?<![\w.'\"])\d{1,4}(?![\w.'\"])")


def _pick(rng: random.Random, *options: str) -> str:
    return rng.choice(options)


def _rename(rng: random.Random, text: str, what: str, pattern: str) -> tuple[str, str] | None:
    names = [n for n in dict.fromkeys(re.findall(pattern, text, re.M)) if n not in KEEP]
    names = [n for n in names if not n.startswith("__") and len(n) > 1]
    if not names:
        return None
    old = rng.choice(names)
    new = name_like(rng, old, text)
    say = _pick(
        rng,
        f"Rename the {what} `{old}` to `{new}`.",
        f"Rename {what} {old} to {new}.",
        f"Please rename `{old}` to `{new}`.",
        f"Rename {old} to {new}",
        f"Rename {old} to {new} everywhere.",
        f"Change the name of the {what} `{old}` to `{new}`.",
        f"The {what} {old} should be called {new}.",
        f"Call the {what} `{new}` instead of `{old}`.",
        f"rename {old} -> {new}",
    )
    return say, replace_word(text, old, new)


def rename_function(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Rename a function or method."""
    return _rename(rng, text, rng.choice(("function", "method")), r"^\s*(?:async )?def (\w+)")


def rename_class(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Rename a class."""
    return _rename(rng, text, "class", r"^\s*class (\w+)")


def rename_parameter(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Rename a parameter and its uses."""
    what = rng.choice(("parameter", "argument"))
    names = [
        n
        for sig in re.findall(r"def \w+\(([^)]*)\)", text)
        for n in re.findall(r"(?:^|,)\s*\**(\w+)", sig)
    ]
    return _rename(rng, text, what, rf"\b({'|'.join(names)})\b") if names else None


def rename_variable(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Rename a local variable."""
    return _rename(rng, text, "variable", r"^\s*(\w+) = ") or _rename(
        rng, text, "variable", r"\bfor (\w+) in "
    )


def rename_attribute(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Rename an attribute of self."""
    return _rename(rng, text, "attribute", r"\bself\.(\w+)")


def rename_any(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Replace every use of a name by another."""
    names = identifiers(text)[:12]
    if not names:
        return None
    old = rng.choice(names)
    new = name_like(rng, old, text)
    say = _pick(
        rng,
        f"Replace {old} with {new}.",
        f"Replace every use of `{old}` with `{new}`.",
        f"Use `{new}` instead of `{old}`.",
        f"Change {old} to {new}.",
        f"Replace all occurrences of {old} by {new}.",
        f"s/{old}/{new}/",
    )
    return say, replace_word(text, old, new)


def rename_two(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Rename two names at once."""
    names = identifiers(text)[:12]
    if len(names) < 2:
        return None
    a, b = rng.sample(names, 2)
    x = name_like(rng, a, text)
    y = name_like(rng, b, text + " " + x)
    say = _pick(
        rng,
        f"Rename {a} to {x} and {b} to {y}.",
        f"Rename `{a}` to `{x}` and `{b}` to `{y}`.",
        f"Change {a} to {x}, and {b} to {y}.",
    )
    return say, replace_word(replace_word(text, a, x), b, y)


def replace_string(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Replace the contents of one string."""
    found = [a or b for a, b in STRING.findall(text)]
    found = [f for f in found if f.strip() == f and text.count(f) == 1]
    if not found:
        return None
    old = rng.choice(found)
    new = " ".join(rng.sample(WORDS, rng.randint(1, 4)))
    if rng.random() < 0.3:
        new = new.capitalize()
    say = _pick(
        rng,
        f'Replace the string "{old}" with "{new}".',
        f'Change "{old}" to "{new}".',
        f"Change the text '{old}' to '{new}'.",
        f'The string "{old}" should be "{new}".',
    )
    return say, text.replace(old, new)


def replace_number(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Replace one number everywhere."""
    found = sorted(set(NUMBER.findall(text)))
    if not found:
        return None
    old = rng.choice(found)
    new = str(rng.choice((rng.randint(2, 20), rng.randint(2, 500), rng.randint(2, 9000))))
    say = _pick(
        rng,
        f"Replace the number {old} with {new}.",
        f"Change {old} to {new}.",
        f"Use {new} instead of {old}.",
        f"Change the value {old} to {new}.",
    )
    return say, re.sub(rf"(?<![\w.'\"]){old}(?![\w.'\"])", new, text)


def remove_comments(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Drop the lines that hold only a comment."""
    lines = text.split("\n")
    kept = [ln for ln in lines if not ln.lstrip().startswith("#")]
    if len(kept) == len(lines) or len(kept) < 3:
        return None
    say = _pick(
        rng,
        "Remove the comments.",
        "Remove all comments.",
        "Delete every comment line.",
        "Strip the comments from this code.",
        "Please remove the comments",
    )
    return say, "\n".join(kept)


DOC = re.compile(r'^[ ]+"""[^"]*"""\n', re.M)


def remove_docstring(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Drop every one-line docstring."""
    new = DOC.sub("", text)
    try:
        compile(new, "<edit>", "exec")
    except (SyntaxError, ValueError):
        return None
    if new == text:
        return None
    say = _pick(
        rng,
        "Remove the docstring.",
        "Remove all docstrings.",
        "Delete the docstrings.",
        "Strip the docstrings from this code.",
        "Drop the docstring",
    )
    return say, new


def add_docstring(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Add a docstring given in the instruction."""
    heads = [
        m
        for m in re.finditer(r"^([ ]*)(?:async )?def (\w+)\(.*\)(?: -> .*)?:\n", text, re.M)
        if not text[m.end() :].lstrip().startswith('"""')
    ]
    if not heads:
        return None
    head = rng.choice(heads)
    doc = " ".join(rng.sample(WORDS, rng.randint(2, 6))).capitalize() + "."
    say = _pick(
        rng,
        f'Add the docstring "{doc}" to {head.group(2)}.',
        f'Give `{head.group(2)}` the docstring "{doc}"',
        f'Add a docstring to the function {head.group(2)}: "{doc}"',
    )
    line = f'{head.group(1)}    """{doc}"""\n'
    return say, text[: head.end()] + line + text[head.end() :]


def change_quotes(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Turn single quotes into double quotes or back."""
    bare = DOC.sub("", text)
    if "'" in bare and '"' not in bare and "'" not in "".join(DOC.findall(text)):
        say = _pick(
            rng,
            "Use double quotes instead of single quotes.",
            "Change single quotes to double quotes.",
            "Convert the strings to double quotes.",
        )
        return say, text.replace("'", '"')
    if '"' in text and "'" not in text and '"""' not in text:
        say = _pick(
            rng,
            "Use single quotes instead of double quotes.",
            "Change double quotes to single quotes.",
            "Convert the strings to single quotes.",
        )
        return say, text.replace('"', "'")
    return None


def repeat(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Repeat the text unchanged."""
    say = _pick(
        rng,
        "Repeat this file unchanged.",
        "Repeat the code exactly.",
        "Copy this code.",
        "Print this file again without changes.",
        "Output the following unchanged.",
        "Repeat this.",
        "Return the code as it is.",
        "Repeat this code word for word.",
    )
    return say, text


def _unique_lines(text: str) -> list[int]:
    lines = text.split("\n")
    return [
        i
        for i, ln in enumerate(lines)
        if len(ln.strip()) > 4 and lines.count(ln) == 1 and len(ln) < 90
    ]


def _new_line(rng: random.Random) -> str:
    a, b, c = (random_name(rng) for _ in range(3))
    return rng.choice(
        (
            f"{a} = {b}",
            f"{a}({b})",
            f"{a} = {b}({c})",
            f'print("{a} {b}")',
            f"# {a} {b} {c}",
            f"{a} = {rng.randint(0, 100)}",
            f"log({a})",
            f"{a}.{b}({c})",
            f'{a} = "{b}"',
        )
    )


def insert_line(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Insert a given line before or after a given line, at the same indentation."""
    lines = text.split("\n")
    spots = _unique_lines(text)
    after = rng.random() < 0.6
    if after:
        spots = [i for i in spots if lines[i].rstrip()[-1] not in ":,([{\\"]
    if not spots:
        return None
    at = rng.choice(spots)
    new = _new_line(rng)
    old = lines[at]
    indent = old[: len(old) - len(old.lstrip())]
    out = lines[: at + after] + [indent + new] + lines[at + after :]
    where = "after" if after else "before"
    say = _pick(
        rng,
        f"Insert the line `{new}` {where} the line `{old.strip()}`.",
        f"Add `{new}` {where} `{old.strip()}`.",
        f"{where.capitalize()} the line\n{old.strip()}\ninsert\n{new}",
    )
    return say, "\n".join(out)


def delete_line(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Delete a given line."""
    spots = _unique_lines(text)
    if len(spots) < 4:
        return None
    lines = text.split("\n")
    at = rng.choice(spots)
    say = _pick(
        rng,
        f"Delete the line `{lines[at].strip()}`.",
        f"Remove the line `{lines[at].strip()}`.",
        f"Remove this line:\n{lines[at].strip()}",
    )
    return say, "\n".join(lines[:at] + lines[at + 1 :])


def replace_line(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Replace a given line with another."""
    spots = _unique_lines(text)
    if not spots:
        return None
    lines = text.split("\n")
    at = rng.choice(spots)
    new, old = _new_line(rng), lines[at].strip()
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    say = _pick(
        rng,
        f"Replace the line `{old}` with `{new}`.",
        f"Change the line `{old}` to `{new}`.",
        f"Replace\n{old}\nwith\n{new}",
    )
    return say, "\n".join(lines[:at] + [indent + new] + lines[at + 1 :])


def add_first_line(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Add an import or a comment at the top or a decorator-like first line."""
    a, b = random_name(rng), random_name(rng)
    new = rng.choice(
        (f"import {a}", f"from {a} import {b}", f"# {a} {b}", f"{a.upper()} = {rng.randint(0, 99)}")
    )
    say = _pick(
        rng,
        f"Add `{new}` at the top.",
        f"Add the line `{new}` at the top of the file.",
        f"Put `{new}` at the start.",
        f"Add {new} as the first line.",
    )
    return say, new + "\n" + text


def add_parameter(rng: random.Random, text: str) -> tuple[str, str] | None:
    """Add a last parameter to a function with a plain one-line signature."""
    heads = list(re.finditer(r"^[ ]*(?:async )?def (\w+)\(([^()*]*)\)", text, re.M))
    if not heads:
        return None
    head = rng.choice(heads)
    new = random_name(rng)
    default = rng.choice(("None", "False", "True", str(rng.randint(0, 20)), '""'))
    new = f"{new}={default}"
    say = _pick(
        rng,
        f"Add the parameter `{new}` to {head.group(1)}.",
        f"Add a parameter {new} to the function {head.group(1)}.",
        f"Give `{head.group(1)}` a new last argument `{new}`.",
    )
    joined = f"{head.group(2).rstrip()}, {new}" if head.group(2).strip() else new
    return say, text[: head.start(2)] + joined + text[head.end(2) :]
