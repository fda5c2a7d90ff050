"""Tokens as bytes, for tokenizers whose decoders do nothing but join bytes: GPT-2's kind, most by now.

The text of several tokens is then that of their bytes, one after the other, and each token's have to be
looked up once only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer


@cache
def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: character -> byte.

    Bytes that print as one Latin-1 character stand for themselves, the others take the code points
    from 256 on, in order.
    """
    # Imported late: transformers takes seconds to load.
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {char: byte for byte, char in bytes_to_unicode().items()}


def decoder_parts(tokenizer: Any) -> list[str]:
    """Returns the kinds of the parts of a transformers tokenizer's decoder, in order; none where it has
    no such decoder."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [part.get("type", "") for part in state.get("decoders", [state])]


class ByteLevelDecoder:
    """Returns the text of ``backend.decode``, as the tokenizers library makes it (its ``decode_chain`` of
    ``ByteLevel``), by a table of tokens' bytes. Ids that the tokenizer does not know add nothing."""

    def __init__(self, backend: Tokenizer, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        if skip_special_tokens:
            added = backend.get_added_tokens_decoder().items()
            self._bytes = {token_id: b"" for token_id, token in added if token.special}

    def __call__(self, token_ids: Sequence[int]) -> str:
        try:
            found = [self._bytes[token_id] for token_id in token_ids]
        except KeyError:
            found = [self._look_up(token_id) for token_id in token_ids]
        return b"".join(found).decode(errors="replace")

    def _look_up(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(self._backend.id_to_token(token_id) or "")
        return found

    def _spell(self, token: str) -> bytes:
        alphabet = byte_level_alphabet()
        if all(char in alphabet for char in token):
            return bytes(alphabet[char] for char in token)
        return token.encode()
