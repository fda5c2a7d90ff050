"""Prompts that are read in slices: how far a request's text was read, and what is left of its prompt."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from drafters.base import ReadingState


class TextReader(ReadingState):
    """A state over a request's live text, read up to some token. Subclasses call ``_read_rest`` before
    they use what was read."""

    def __init__(self, token_ids: Sequence[int], first: int = 0, wants: bool = True) -> None:
        """``first``: the first token that is read. ``wants``: whether anything is read at all."""
        self._token_ids = token_ids
        self._num_read = first
        self._num_to_read = len(token_ids) if wants else 0

    @abstractmethod
    def _read(self, start: int, end: int) -> None:
        """Takes in the tokens ``start`` .. ``end - 1`` of the text; those before were read."""

    def read_prompt(self, num_tokens: int) -> int:
        """See ``ReadingState``."""
        start = self._num_read
        if not self._num_to_read:
            return 0
        end = min(start + num_tokens, len(self._token_ids))
        self._read(start, end)
        self._num_read = end
        return end - start

    def _read_rest(self) -> None:
        """Reads what is left of the prompt."""
        if self._num_read < self._num_to_read:
            self.read_prompt(self._num_to_read - self._num_read)
