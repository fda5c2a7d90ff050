"""Users' texts as text: what is spelled like a special token in them is no such token.

A chat template writes its special tokens by their spelling, and a tokenizer cannot tell those from the
same spelling within a message, which so could end its turn and begin another's. Hence two steps:

- While the template works, such spellings in users' texts stand as private characters, as many as
  there were (``Disguise``), so that lengths, trimming and searching come out as usual.
- Then the template's own special tokens get names that nobody can guess, and the texts their spelling
  back. A second tokenizer knows special tokens by those names only (``TextEncoder``), and takes the
  whole in one go: all else becomes the very tokens that it would be without.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from tokenizers import AddedToken, Tokenizer

from server.errors import refused

_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
Span = tuple[int, int]
Text = str | list[tuple[bool, str]]
"""A text in which special tokens may be spelled anywhere; or its pieces, and whether they may in each."""


def joined(text: Text) -> str:
    return text if isinstance(text, str) else "".join(piece for _, piece in text)


class Spellings:
    """How the special tokens of a tokenizer are written."""

    def __init__(self, tokenizer: Any) -> None:
        known = tokenizer.added_tokens_decoder.values()
        self.tokens = {str(each): each for each in known if each.special and str(each)}
        longest_first = sorted(self.tokens, key=len, reverse=True)
        # Without any, what is found nowhere.
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._longest = max(map(len, self.tokens), default=0)
        self._begins = {each[:at] for each in self.tokens for at in range(1, len(each))}
        self._ends = {each[at:] for each in self.tokens for at in range(1, len(each))}
        self._firsts = {each[0] for each in self.tokens}
        self._lasts = {each[-1] for each in self.tokens}

    def spans(self, text: str) -> list[Span]:
        """Where they are, and where the text's begin or end is a part of one that what stands next to
        the text might complete. In order, and apart."""
        if not self._may_be_in(text):
            return []
        spans = [match.span() for match in self.pattern.finditer(text)]
        sizes = range(min(self._longest, len(text)), 0, -1)
        ends = ((len(text) - size, len(text)) for size in sizes if text[-size:] in self._begins)
        begins = ((0, size) for size in sizes if text[:size] in self._ends)
        for found in (ends, begins):
            apart = (
                (first, end)
                for first, end in found
                if all(end <= other[0] or other[1] <= first for other in spans)
            )
            spans += islice(apart, 1)
        return sorted(spans)

    def _may_be_in(self, text: str) -> bool:
        """False for most texts, at little cost: no character is there that begins a token, nor near
        the text's begin one that ends a token."""
        begin = text[: self._longest]
        return any(char in text for char in self._firsts) or any(
            char in begin for char in self._lasts
        )


class Disguise:
    """For the texts of one request: each spelling in them has a private character that none of them
    has, and is written as a run of it of the spelling's length.

    ``texts``: everything that a template is given, and its own text. Raises ApiError 400 where there
    is no private character left.
    """

    def __init__(self, spellings: Spellings, given: Any, template: str) -> None:
        self._spellings = spellings
        texts = list(_strings(given))
        hidden = {text[first:end] for text in texts for first, end in spellings.spans(text)}
        taken = "\n".join((template, *texts)) if hidden else ""
        free = (
            char
            for char in map(chr, chain(*_PRIVATE))
            if char not in taken and _escaped(char) not in taken
        )
        self._chars = {spelling: next(free, "") for spelling in sorted(hidden)}
        if not all(self._chars.values()):
            raise refused("messages", ": too many private characters")
        self._hidden = {char: spelling for spelling, char in self._chars.items()}

    def put_on(self, given: Any) -> Any:
        """The same JSON with its texts disguised."""
        if isinstance(given, dict):
            return {self.put_on(name): self.put_on(value) for name, value in given.items()}
        if isinstance(given, list):
            return [self.put_on(each) for each in given]
        if not isinstance(given, str):
            return given
        parts, at = [], 0
        for first, end in self._spellings.spans(given):
            parts += [given[at:first], self._chars[given[first:end]] * (end - first)]
            at = end
        return "".join((*parts, given[at:]))

    def take_off(self, rendered: str) -> Text:
        """Returns the output of a template with the texts as they were; special tokens are those of the
        template."""
        if not self._hidden:
            return [(True, rendered)]
        for char in self._hidden:
            rendered = rendered.replace(_escaped(char), char)
        runs = "|".join(f"{char}+" for char in self._hidden)
        # Every other part is a run.
        parts = re.split(f"({runs})", rendered)
        # A template may have cut the last spelling of a run.
        parts[1::2] = [_repeat(self._hidden[run[0]], len(run)) for run in parts[1::2]]
        return [(at % 2 == 0, part) for at, part in enumerate(parts) if part]


def _strings(given: Any) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, dict):
        yield from given
        yield from chain.from_iterable(map(_strings, given.values()))
    elif isinstance(given, list):
        yield from chain.from_iterable(map(_strings, given))


def _escaped(char: str) -> str:
    """As a template that writes JSON in ASCII may write it."""
    return json.dumps(char)[1:-1]


def _repeat(spelling: str, size: int) -> str:
    """So many characters of a spelling, time and again."""
    return (spelling * (size // len(spelling) + 1))[:size]


class TextEncoder:
    """Texts to token ids. ``tokenizer``: one of transformers'."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.spellings = Spellings(tokenizer)
        # Nobody can guess them.
        self._names = {
            spelling: f"\ue000{secrets.token_hex(16)}\ue001" for spelling in self.spellings.tokens
        }
        # Then other spellings may become theirs.
        self._are_normalized = any(each.normalized for each in self.spellings.tokens.values())
        self._plain = self._build_plain(getattr(tokenizer, "backend_tokenizer", None))
        self._named = {
            self._plain.token_to_id(name): tokenizer.convert_tokens_to_ids(spelling)
            for spelling, name in self._names.items()
            if self._plain is not None
        }

    def __reduce__(self) -> tuple[Any, ...]:
        # The second tokenizer is made in a millisecond, and sent in a second.
        return TextEncoder, (self._tokenizer,)

    def encode(self, field: str, text: Text, add_special_tokens: bool) -> list[int]:
        """Encodes a text with the special tokens that may be spelled in it. ``field`` is named in the
        ApiError 400 that is raised where the tokenizer cannot take others as text."""
        if isinstance(text, str) or self._has_no_others(text):
            token_ids: list[int] = self._tokenizer.encode(
                joined(text), add_special_tokens=add_special_tokens
            )
            return token_ids
        if self._plain is None:
            raise refused(
                field,
                ": this model's tokenizer cannot take special tokens as text; leave them out, "
                "or send 'allow_special_tokens': true",
            )
        named = "".join(
            self.spellings.pattern.sub(lambda found: self._names[found[0]], piece)
            if may_have
            else piece
            for may_have, piece in text
        )
        token_ids = self._plain.encode(named, add_special_tokens=add_special_tokens).ids
        return [self._named.get(token_id, token_id) for token_id in token_ids]

    def _has_no_others(self, pieces: list[tuple[bool, str]]) -> bool:
        """Returns whether a tokenizer finds no special tokens in a text but those that it may have."""
        if self._are_normalized:
            return False
        if all(may_have for may_have, _ in pieces):
            return True
        return self.spellings.pattern.search(joined(pieces)) is None

    def _build_plain(self, backend: Tokenizer | None) -> Tokenizer | None:
        if backend is None:
            return None
        plain = Tokenizer(backend.model)  # shared, not copied
        plain.normalizer = backend.normalizer
        plain.pre_tokenizer = backend.pre_tokenizer
        plain.post_processor = backend.post_processor
        added = backend.get_added_tokens_decoder()
        for _, token in sorted(added.items()):
            (plain.add_special_tokens if token.special else plain.add_tokens)([token])
        if plain.get_added_tokens_decoder().keys() != added.keys():
            # Ids with gaps come out so only where a tokenizer is read as it was written.
            plain = Tokenizer.from_str(backend.to_str())
        names = self._names.items()
        plain.add_tokens([_renamed(self.spellings.tokens[each], name) for each, name in names])
        plain.encode_special_tokens = True
        return plain


def _renamed(token: AddedToken, name: str) -> AddedToken:
    """Not special, so that it is found where special ones are text."""
    return AddedToken(
        name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False
    )
