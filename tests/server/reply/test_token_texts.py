from __future__ import annotations

from tokenizers import pre_tokenizers

from server.reply.byte_level import byte_level_alphabet
from server.reply.token_texts import TokenTexts
from worlds.scripted_engine import BOS, VOCAB_SIZE, byte_tokenizer, sentencepiece_tokenizer


def test_the_byte_alphabet_is_the_tokenizers_own() -> None:
    alphabet = byte_level_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))


def test_byte_level_tokens_have_their_own_bytes_and_texts() -> None:
    texts = TokenTexts(byte_tokenizer())
    assert [texts.token_bytes(each) for each in range(256)] == [
        bytes([each]) for each in range(256)
    ]
    assert texts.text(ord("a")) == "a"
    assert texts.text(0xE2) == "bytes:\\xe2"
    assert texts.text(BOS) == "<s>"
    assert len({texts.text(each) for each in range(260)}) == 260
    # Ids beyond the tokenizer are empty.
    assert (texts.text(VOCAB_SIZE - 1), texts.token_bytes(VOCAB_SIZE - 1)) == ("", b"")


def test_sentencepiece_marks_are_spaces_and_byte_tokens_are_bytes() -> None:
    texts = TokenTexts(sentencepiece_tokenizer())
    assert texts.text(257) == " hello"
    assert texts.token_bytes(0xE2) == b"\xe2"
    assert texts.text(263) == "é"


def test_pieces_add_up_to_the_text() -> None:
    texts = TokenTexts(byte_tokenizer())
    assert texts.pieces([BOS, *"a€".encode(), 0xE2]) == ["", "a", "", "", "€", "\ufffd"]
