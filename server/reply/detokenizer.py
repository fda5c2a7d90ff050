"""Tokens to text, one at a time, and the search for stop strings in what comes out.

Owned by one choice of one request, on the event loop. Neither the text nor the place of a stop
depends on how tokens arrive in groups: everything is decided token by token, because with
speculation the grouping is chance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from server.reply.byte_level import ByteLevelDecoder, decoder_parts

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"
_MAX_PENDING = 16
_MAX_CHAR_BYTES = 4


def decoder(tokenizer: Any, *, skip_special_tokens: bool = False) -> Decode:
    """How a transformers tokenizer decodes, without clean-up of spaces. Where transformers only hands
    token ids on to the tokenizers library, that is called at once: it takes a fifth of the time; and
    where that only joins bytes, they are joined here. To be kept: what it has looked up it knows."""
    # Imported late: this module is of use without it, and it takes seconds to load.
    from transformers import PreTrainedTokenizerBase, TokenizersBackend

    kind = type(tokenizer)
    if (
        getattr(kind, "decode", None) is PreTrainedTokenizerBase.decode
        and getattr(kind, "_decode", None) is TokenizersBackend._decode
    ):
        backend = tokenizer.backend_tokenizer
        if decoder_parts(tokenizer) == ["ByteLevel"]:
            return ByteLevelDecoder(backend, skip_special_tokens)
        return partial(backend.decode, skip_special_tokens=skip_special_tokens)
    return partial(
        tokenizer.decode,
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )


class IncrementalDetokenizer:
    """Pieces whose concatenation is the text of all tokens.

    A token is decoded next to the ones before it, since decoders join words and strip spaces by
    their neighbours (the prefix-offset method of Hugging Face's text-generation-inference). A
    trailing U+FFFD may be the start of a character whose bytes are still to come, so it waits for
    the next token or for ``flush``.

    The one case in which the pieces differ from decoding at once: invalid UTF-8 in a byte-fallback
    vocabulary, whose decoder judges a whole run of bytes and so takes back characters it had shown
    before.
    """

    def __init__(
        self,
        decode: Decode,
        context_token_ids: Sequence[int] = (),
        skipped_token_ids: Collection[int] = (),
    ) -> None:
        """``context_token_ids``: the prompt's last tokens; ``skipped_token_ids`` add no text."""
        self._decode = decode
        self._skipped = skipped_token_ids
        self._window = [each for each in context_token_ids if each not in skipped_token_ids]
        self._shown = decode(self._window) if self._window else ""
        if self._shown.endswith(REPLACEMENT):
            # The prompt ends inside a character, so its last bytes cannot be shown as context.
            self._window, self._shown = [], ""
        self._num_shown = len(self._window)

    @property
    def is_pending(self) -> bool:
        """Whether a token waits for others to become text."""
        return self._num_shown < len(self._window)

    def add(self, token_id: int) -> str:
        """The text that this token completes, often its own, sometimes none."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) > len(self._shown) and not text.endswith(REPLACEMENT):
            return self._show(len(self._window), text)
        if len(self._window) - self._num_shown >= _MAX_PENDING:
            return self._show_stable_part(text)
        return ""

    def flush(self) -> str:
        """Returns what was held back, at the end of the choice."""
        if not self.is_pending:
            return ""
        text = self._decode(self._window)
        if not text.startswith(self._shown):
            text = self._shown + self._decode(self._window[self._num_shown :])
        return self._show(len(self._window), text)

    def _show(self, num_tokens: int, text: str) -> str:
        """Give out ``text``, that of the first ``num_tokens``; they are the next tokens'
        context.
        """
        piece = text[len(self._shown) :]
        del self._window[: self._num_shown]
        self._num_shown = num_tokens - self._num_shown
        self._shown = self._decode(self._window[: self._num_shown])
        return piece

    def _show_stable_part(self, text: str) -> str:
        """Give out all but a last character that may still be incomplete.

        A cut through a character shows: its halves decode to other text than the whole.
        """
        for num_last in range(1, _MAX_CHAR_BYTES):
            head, tail = self._window[:-num_last], self._window[-num_last:]
            head_text = self._decode(head)
            if head_text + self._decode(tail) == text:
                return self._show(len(head), head_text)
        return ""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """``start`` and ``end`` count characters from the start of the choice's text."""

    stop: str
    start: int
    end: int


class StopMatcher:
    """Finds the stop string that is completed first; of two completed at once, the longer.

    Text that could be the start of a stop string is ``held`` back, so ``feed`` gives out only what no
    later piece can turn into a part of a match.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self.held = ""
        self.num_released = 0

    def feed(self, piece: str, *, armed: bool = True) -> tuple[str, StopMatch | None]:
        """(text to give out, match). Text at and after a match's start is given out by the caller.

        A stop string counts only if its last character arrives ``armed``.
        """
        text = self.held + piece
        if armed and (match := self._find(text)):
            return "", match
        num_held = self._num_held(text)
        self.held = text[len(text) - num_held :]
        self.num_released += len(text) - num_held
        return text[: len(text) - num_held], None

    def _find(self, text: str) -> StopMatch | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, len(self.held) - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is None:
            return None
        end, start, stop = best
        return StopMatch(stop, self.num_released + start, self.num_released + end)

    def _num_held(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string without completing it."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
