"""The text and the bytes of single tokens, for logprobs and for telling tokens apart.

A token of a byte-level or byte-fallback vocabulary may be a part of a character. Decoding it alone
gives U+FFFD, the same for all of them, so such a token is written ``bytes:\\xe2\\x82``, as
OpenAI's completions do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any

from server.reply.byte_level import byte_level_alphabet, decoder_parts
from server.reply.detokenizer import IncrementalDetokenizer, decoder

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CACHE_SIZE = 1 << 16


class TokenTexts:
    """Looks tokens up in a transformers tokenizer; answers are cached."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self._decode = decoder(tokenizer)
        self._added = {
            token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        # Those that decoders leave out; not all of them have a role.
        self._flagged = {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._alphabet = byte_level_alphabet() if "ByteLevel" in decoder_parts(tokenizer) else None
        # Wrapped here and not by a decorator: the cache dies with this object.
        self.text: Callable[[int], str] = lru_cache(_CACHE_SIZE)(self._text)
        self.token_bytes: Callable[[int], bytes] = lru_cache(_CACHE_SIZE)(self._token_bytes)

    def hidden_ids(self, shown: Collection[str]) -> frozenset[int]:
        """Special tokens other than those with these texts."""
        names = {each: self._added.get(each, "") for each in self.special_ids | self._flagged}
        return frozenset(each for each, name in names.items() if name not in shown)

    def entry(self, token_id: int) -> str:
        """Returns the vocabulary's own entry, in which other characters may stand for bytes and spaces;
        "" for an id outside of it."""
        found: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return found or ""

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Returns what each token adds to the text of all; special tokens add nothing."""
        detokenizer = IncrementalDetokenizer(self._decode, (), self.special_ids)
        pieces = [detokenizer.add(token_id) for token_id in token_ids]
        pieces[-1] += detokenizer.flush()
        return pieces

    def _text(self, token_id: int) -> str:
        """The token's text; never the same for two tokens of different bytes."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _token_bytes(self, token_id: int) -> bytes:
        """The token's UTF-8 bytes; none for an id outside the tokenizer's vocabulary."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._alphabet is not None and all(char in self._alphabet for char in token):
            return bytes(self._alphabet[char] for char in token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        if token.startswith("\u2581"):
            # SentencePiece's mark of a space; decoding the token alone would strip it.
            return token.replace("\u2581", " ").encode()
        return self._decode([token_id]).encode()
