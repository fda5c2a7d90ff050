"""``phrase_book``: drafts from fixed phrases that the operator knows the output will hold.

Licence headers, boilerplate, the standard answers of a help desk: text that comes back in many
requests, but neither in the prompt, where prompt lookup would find it, nor yet in a tenant's history.
The book is a text file, phrases apart by lines of ``---``; the variable ``PHRASE_BOOK``
names it. Without it, a small book of Python's boilerplate is used. It is read and tokenised with the
target's own tokenizer once, at start.

A draft is the rest of the phrase whose text, up to some place, ends as the request does: the longest
match wins, then the phrase that comes first in the book. Memory: a few integers per token of the
book. Work per step: bounded by ``_MAX_PLACES`` places and ``_MAX_MATCH`` tokens each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from drafters.base import (
    Drafter,
    DrafterContext,
    DrafterInfo,
    DrafterOption,
    DraftRequest,
    NewRequest,
    RequestState,
)
from drafters.tree import DraftTree, chain

VARIABLE = "PHRASE_BOOK"
SEPARATOR = "---"

_MAX_MATCH = 16
_MAX_PLACES = 64
_MAX_BOOK_TOKENS = 1_000_000

_PYTHON = """\
from __future__ import annotations
---
if __name__ == "__main__":
    main()
---
if __name__ == "__main__":
    sys.exit(main())
---
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
---
    args = parser.parse_args()
---
if __name__ == "__main__":
    unittest.main()
---
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
---
    def __repr__(self):
        return f"{self.__class__.__name__}({self.name!r})"
---
        raise NotImplementedError()
---
logger = logging.getLogger(__name__)
---
    with open(path, "r", encoding="utf-8") as f:
        return json.load(f)
---
import os
import sys
"""


class PhraseBook:
    """Tokenised phrases and, for each pair of tokens, the places where it ends."""

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        """Raises ValueError for a book without phrases and for one that is too long."""
        self._phrases = [list(phrase) for phrase in phrases if len(phrase) > 2]
        num_tokens = sum(map(len, self._phrases))
        if not self._phrases:
            raise ValueError("the phrase book holds no phrase of three tokens or more")
        if num_tokens > _MAX_BOOK_TOKENS:
            raise ValueError(f"the phrase book has {num_tokens} tokens, over {_MAX_BOOK_TOKENS}")
        self._places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for number, phrase in enumerate(self._phrases):
            # The last token has nothing after it that could be drafted.
            for position in range(1, len(phrase) - 1):
                pair = (phrase[position - 1], phrase[position])
                places = self._places.setdefault(pair, [])
                if len(places) < _MAX_PLACES:
                    places.append((number, position))

    def rest(
        self, token_ids: Sequence[int], min_match: int, num_tokens: int
    ) -> tuple[Sequence[int], int]:
        """At most ``num_tokens`` that go on after the text, and how many tokens matched before."""
        best, place = min_match - 1, None
        pair = tuple(token_ids[-2:])
        for number, position in self._places.get(pair, ()) if len(pair) == 2 else ():
            length = _match_length(token_ids, self._phrases[number], position)
            if length > best:
                best, place = length, (number, position)
        if place is None:
            return (), 0
        number, position = place
        return self._phrases[number][position + 1 : position + 1 + num_tokens], best


def _match_length(token_ids: Sequence[int], phrase: Sequence[int], position: int) -> int:
    """How many tokens up to ``position`` of the phrase are the text's last, ``_MAX_MATCH`` at most."""
    most = min(len(token_ids), position + 1, _MAX_MATCH)
    for length in range(most):
        if token_ids[-1 - length] != phrase[position - length]:
            return length
    return most


class PhraseState(RequestState):
    """One request: nothing to keep but its option. The book does not change, so nothing is learned."""

    def __init__(self, book: PhraseBook, min_match: int) -> None:
        self._book = book
        self._min_match = min_match

    def propose(self, request: DraftRequest) -> DraftTree:
        rest, length = self._book.rest(request.token_ids, self._min_match, request.depth)
        # The feature under which acceptance is counted: how much of the phrase stood before a node.
        return chain(rest, [min(length + depth, _MAX_MATCH) for depth in range(len(rest))])


class PhraseBookDrafter(Drafter):
    """Drafts from one book for all requests."""

    info = DrafterInfo(
        name="phrase_book",
        description=(
            "Copies the rest of a phrase from the operator's book once the text has begun it. Best for "
            "boilerplate that neither the prompt nor earlier requests hold."
        ),
        drafts_trees=False,
        options=(
            DrafterOption(
                "min_match", 2, "Tokens of a phrase that must stand before a draft.", 2, 16
            ),
        ),
        cost="microseconds per step; a few integers per token of the book",
    )

    def __init__(self, book: PhraseBook) -> None:
        super().__init__()
        self._book = book

    def start(self, request: NewRequest) -> PhraseState:
        return PhraseState(self._book, int(request.options["min_match"]))


def read_phrases(text: str) -> list[str]:
    """Phrases of a book, without the line break before a separator; blank ones are left out."""
    phrases: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.rstrip() == SEPARATOR:
            phrases.append([])
        else:
            phrases[-1].append(line)
    return [phrase for lines in phrases if (phrase := "\n".join(lines)).strip()]


def make_drafter(context: DrafterContext) -> PhraseBookDrafter:
    """The entry point. Raises OSError and ValueError for a book that cannot be used, and
    DrafterUnavailableError where there is no tokenizer: the server explains either."""
    path = os.environ.get(VARIABLE)
    text = _PYTHON if path is None else Path(path).read_text(encoding="utf-8")
    # How a phrase's first tokens come out depends on what stands before it, so both usual ways.
    openings = ("", "\n")
    phrases = read_phrases(text)
    return PhraseBookDrafter(
        PhraseBook([context.encode(head + each) for each in phrases for head in openings])
    )
