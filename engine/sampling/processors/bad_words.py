"""``bad_words``: texts that must not be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from annotated_types import MaxLen, MinLen

from engine.request.errors import RequestError
from engine.sampling.processor import (
    Facts,
    LogitsProcessor,
    Parameter,
    Path,
    Stage,
    Vocabulary,
    check_token_ids,
    register,
)


@register
class BadWords(LogitsProcessor):
    """The last token of a word is ruled out where its others end the text, prompt included."""

    stage = Stage.FORBID
    fields: ClassVar = {"bad_words_token_ids": ()}
    parameters = (
        Parameter(
            "bad_words",
            Annotated[list[Annotated[str, MinLen(1), MaxLen(256)]], MaxLen(128)],
            [],
            "Up to 128 texts, of up to 256 characters, that must not be written.",
        ),
    )

    def __init__(self, facts: Facts, bad_words_token_ids: Sequence[Path]) -> None:
        words = [word for word in bad_words_token_ids if word]
        check_token_ids("bad_words", [each for word in words for each in word], facts.vocab_size)
        self._always = sorted({word[0] for word in words if len(word) == 1})
        self._sequences = [word for word in words if len(word) > 1]
        self._tail_len = max(map(len, self._sequences), default=1) - 1
        self._tail: Path = ()
        self.append(facts.prompt_token_ids)

    @classmethod
    def resolve(cls, values: Mapping[str, Any], vocabulary: Vocabulary) -> Mapping[str, Any]:
        """Each word as it is written at the start of a text and after a space."""
        sequences: dict[Path, None] = {}
        for word in values["bad_words"]:
            for text in (word, " " + word.lstrip(" ")):
                token_ids = tuple(vocabulary.encode(text))
                if not token_ids:
                    raise RequestError("bad_words", f"bad_words: {word!r} has no tokens")
                sequences[token_ids] = None
        return {"bad_words_token_ids": tuple(sequences)}

    def append(self, token_ids: Sequence[int]) -> None:
        text = [*self._tail, *token_ids[-self._tail_len :]] if self._tail_len else []
        self._tail = tuple(text[max(0, len(text) - self._tail_len) :])

    def forbidden(self, path: Path) -> list[int]:
        """Tokens that may not follow ``path``."""
        text = (*self._tail, *path)
        return self._always + [w[-1] for w in self._sequences if text[1 - len(w) :] == w[:-1]]
