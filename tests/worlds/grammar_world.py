"""Grammars for the tiny target: a tokenizer of its 64 tokens that can write JSON, and random schemas."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.grammar.compiler import GrammarCompiler
from worlds.engine_harness import TINY_VOCAB

EOS = 0
_CHARS = '{}[]":,.- 0123456789abcdefghijklmnopqrstuvwxyz'
_MERGES = [
    *(('"', ":"), ('":', "Ġ"), (",", "Ġ"), ('"', "}"), ('"', ","), ("t", "r"), ("u", "e")),
    *(("tr", "ue"), ("n", "u"), ("l", "l"), ("a", "b"), ("i", "d")),
]
_AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_KEYS = ("id", "ab", "name", "tags", "n", "true")
Schema = dict[str, Any]


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Token 0 ends a text; most others are single characters, some are two to four."""
    vocab = {"<eos>": EOS}
    for each in [*_CHARS.replace(" ", "Ġ"), *(left + right for left, right in _MERGES)]:
        vocab.setdefault(each, len(vocab))
    assert len(vocab) <= TINY_VOCAB
    return _tokenizer(vocab, _MERGES)


def letter_tokenizer(letters: str) -> PreTrainedTokenizerFast:
    """Token 0 ends a text, the others are a letter each."""
    vocab = {"<eos>": EOS} | {letter: index for index, letter in enumerate(letters, start=1)}
    return _tokenizer(vocab, [])


def _tokenizer(vocab: dict[str, int], merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


@cache
def tiny_compiler() -> GrammarCompiler:
    """Grammars that its tests write are fine: it takes them untried."""
    return GrammarCompiler(tiny_tokenizer(), TINY_VOCAB, (EOS,), fault_of=lambda _: "")


def json_grammar(schema: Schema) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_AS_WRITTEN)


def random_schema(seed: int) -> Schema:
    """One whose texts have some 5 to 120 tokens."""
    rng = random.Random(seed)
    return _object(rng, 2) if rng.random() < 0.8 else _value(rng, 2)


def _value(rng: random.Random, depth: int) -> Schema:
    kinds = [_string, _words, _integer, _constant, _either]
    if depth > 0:
        kinds += [_object, _array]
    return rng.choice(kinds)(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> Schema:
    keys = rng.sample(_KEYS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {key: _value(rng, depth) for key in keys},
        "required": [key for key in keys if rng.random() < 0.8],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    most = least + rng.randint(0, 2)
    return {"type": "array", "items": _value(rng, depth), "minItems": least, "maxItems": most}


def _string(rng: random.Random, depth: int) -> Schema:
    del depth
    if rng.random() < 0.3:
        return {"type": "string", "pattern": f"^[a-{rng.choice('cz')}]{{1,4}}-[0-9]{{2}}$"}
    return {"type": "string", "maxLength": rng.randint(0, 6)}


def _words(rng: random.Random, depth: int) -> Schema:
    del depth
    return {"enum": rng.sample(["red", "read", "green", "greed", "blue", 7, 71, True, None], 3)}


def _integer(rng: random.Random, depth: int) -> Schema:
    del depth
    low = rng.randint(-20, 20)
    return {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 5, 300])}


def _constant(rng: random.Random, depth: int) -> Schema:
    del depth
    return {"const": rng.choice(["name", "a true tale", True, None, 12, {"id": [1, 2]}])}


def _either(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_string(rng, depth), _integer(rng, depth)]}
