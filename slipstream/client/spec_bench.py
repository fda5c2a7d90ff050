"""Questions in Spec-Bench's form (Xia et al., 2024, https://github.com/hemingkx/Spec-Bench).

Each line of such a file has a ``question_id``, a ``category`` and ``turns``: what is asked first, and
after the answer. The authors report MT-bench's eight categories as one group, and five more.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MT_BENCH = "mt_bench"
MT_BENCH_CATEGORIES = (
    *("writing", "roleplay", "reasoning", "math"),
    *("coding", "extraction", "stem", "humanities"),
)
SPEC_BENCH = (MT_BENCH, "translation", "summarization", "qa", "math_reasoning", "rag")
"""The groups that Spec-Bench's authors report."""
_ID_REMAINDERS = {"odd": (1,), "even": (0,), "all": (0, 1)}
IDS = tuple(_ID_REMAINDERS)


def _is_question(line: Any) -> bool:
    return (
        isinstance(line, dict)
        and isinstance(line.get("question_id"), int)
        and isinstance(line.get("category"), str)
        and isinstance(line.get("turns"), list)
        and bool(line["turns"])
        and all(isinstance(each, str) for each in line["turns"])
    )


def group_of(category: str) -> str:
    return MT_BENCH if category in MT_BENCH_CATEGORIES else category


@dataclass(frozen=True, slots=True)
class Questions:
    """A file of questions. ``ids``: one of ``IDS``; ``per_category``: so many of each of the file's own
    categories at most, None: all."""

    file: Path
    ids: str = "all"
    per_category: int | None = None

    def of(self, group: str) -> list[dict[str, Any]]:
        """The questions of a category, or of the categories that are MT-bench's."""
        categories = MT_BENCH_CATEGORIES if group == MT_BENCH else (group,)
        lines = [
            line for line in self._read() if line["question_id"] % 2 in _ID_REMAINDERS[self.ids]
        ]
        by_category = ([each for each in lines if each["category"] == name] for name in categories)
        return [each for found in by_category for each in found[: self.per_category]]

    def names(self) -> tuple[str, ...]:
        """Its categories, and MT-bench's group where it has some of those."""
        own = dict.fromkeys(line["category"] for line in self._read())
        return (*own, *((MT_BENCH,) if own.keys() & set(MT_BENCH_CATEGORIES) else ()))

    def groups(self) -> tuple[str, ...]:
        """Its groups, each category in one of them."""
        return tuple(dict.fromkeys(group_of(line["category"]) for line in self._read()))

    def _read(self) -> list[dict[str, Any]]:
        """Raises OSError, ValueError and KeyError for what cannot be read, or is no such file."""
        text = self.file.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.split("\n") if line.strip()]
        for number, line in enumerate(lines, 1):
            if not _is_question(line):
                raise ValueError(f"question {number} has no question_id, category or turns")
        return lines
