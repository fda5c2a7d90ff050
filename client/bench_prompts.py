"""What a bench sends: prompts from a file, or a few of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client.errors import FlagError


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """An endpoint's path, and the field that holds the prompt."""

    path: str
    fields: Mapping[str, Any]


_FUNCTION = '''\
def load_table(path, separator=","):
    """Read numbers from a file."""
    rows = []
    with open(path) as stream:
        for line in stream:
            parts = line.strip().split(separator)
            rows.append([float(part) for part in parts])
    return rows
'''
_CLASS = '''\
class Account:
    """A balance that cannot fall below zero."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
'''
_EDITS = (
    f"Please rename `load_table` to `load_numbers`.\n\n{_FUNCTION}",
    f"Please rename `rows` to `table`.\n\n{_FUNCTION}",
    f"Please rename `Account` to `Wallet`.\n\n{_CLASS}",
    f"Please add a method `withdraw`.\n\n{_CLASS}",
)
_BEGINNINGS = (
    _FUNCTION + "\n\ndef save_table(path, rows, separator",
    _CLASS + "\n    def withdraw(self, amount):\n",
    "import json\n\n\ndef read_json(path):\n",
    "def quicksort(values):\n",
)


def builtin_prompts() -> list[BenchPrompt]:
    """Code to edit and code to continue, by turns: the first repeats its prompt, the second less."""
    prompts = []
    for edit, beginning in zip(_EDITS, _BEGINNINGS, strict=True):
        prompts.append(_chat([{"role": "user", "content": edit}]))
        prompts.append(_completion(beginning))
    return prompts


def read_prompts(path: Path) -> list[BenchPrompt]:
    """JSON lines with "prompt" or "messages"; the server checks what is in them. Raises FlagError
    naming the line."""
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise FlagError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise FlagError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(found, dict) or ("prompt" in found) == ("messages" in found):
            raise FlagError(
                f'{path}, line {number}: must be an object with either "prompt" or "messages"'
            )
        prompts.append(
            _completion(found["prompt"]) if "prompt" in found else _chat(found["messages"])
        )
    if not prompts:
        raise FlagError(f"{path} has no prompts")
    return prompts


def _chat(messages: Any) -> BenchPrompt:
    return BenchPrompt("/v1/chat/completions", {"messages": messages})


def _completion(prompt: Any) -> BenchPrompt:
    return BenchPrompt("/v1/completions", {"prompt": prompt})
