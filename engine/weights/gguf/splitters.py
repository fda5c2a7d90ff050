"""How a GGUF file's vocabulary has text cut before it is merged (tokenizer.ggml.pre)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS_OF_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_KANJI_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_WIDE_MARKS = (
    "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
)
_EAST_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_MARKED_WORDS = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _ENDS_OF_LINES
)


def _words(digits: str, marks: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*", letters: str = r"\p{L}+") -> str:
    """Contractions, words with one sign before them, digits, marks and white space."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}|{marks}|{_ENDS_OF_LINES}"


def _cased(others: str = "") -> str:
    """Words that end where a capital follows small letters. ``others``: scripts that are none of them."""
    but = f"&&[^{others}]" if others else ""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    start, end = r"[^\r\n\p{L}\p{N}]?", rf"{_CONTRACTIONS}?"
    return f"{start}{upper}*{lower}+{end}|{start}{upper}+{lower}*{end}"


_HAN = r"\p{Han}"
_LETTERS_OF_CASES = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{2d00}-\x{2d2d}\x{1d400}-\x{1d7cb}]]"
)
_CHINESE_AND_KOREAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
_DEEPSEEK = (r"\p{N}{1,3}", _KANJI_AND_KANA, _MARKED_WORDS)
_SPLITTERS: dict[str, tuple[str, ...]] = {
    "afmoe": (r"\d{1,3}(?=(?:\d{3})*(?!\d))", _EAST_ASIAN, _MARKED_WORDS),
    "bailingmoe": (_words(r"\p{N}").replace(r"\s*[\r\n]+", r"\s*[\r\n]"),),
    "bloom": (r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",),
    "chatglm-bpe": (_words(r"\p{N}{1,3}"),),
    "deepseek-coder": (
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_AND_KOREAN, r"\p{N}",
    ),
    "deepseek-llm": (
        r"[\r\n]", rf"\s?{_LETTERS_OF_CASES}+",
        r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
        r"\s+$", _CHINESE_AND_KOREAN, r"\p{N}+",
    ),
    "deepseek-v3": _DEEPSEEK,
    "exaone-moe": (
        _words(
            r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]?", r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
        ).replace(r"\s*[\r\n]+", r"\s*[\r\n]"),
    ),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "grok-2": (_words(r"\p{N}"),),
    "hunyuan": (_words(r"\p{N}"),),
    "jais-2": (
        _words(r"\p{N}{1,3}").replace(r"\s+(?!\S)|\s+", rf"{_SPACES}|\s{{1,2}}(?!\S)|\s"),
    ),
    "laguna": (r"[^\n]+|\n+", _words(r"\p{N}")),
    "minicpm5": (r"\p{N}{1,3}", _words(r"\p{N}+")),
    "kimi-k2": (
        rf"\p{{Han}}+|{_cased(_HAN)}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS_OF_LINES}",
    ),
    "seed-coder": (_words(r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+"),),
    "solar-open": (_words(r"\p{N}"),),
    "spark2_5": (
        r"\p{N}", _KANJI_AND_KANA, _MARKED_WORDS.replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"),
    ),
    "stablelm2": (_words(r"\p{N}"),),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "tiny_aya": (
        r"\d{1,3}(?=(?:\d{3})*\b)",
        rf"{_cased()}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS_OF_LINES}",
    ),
    "ufakzeka": (_words(r"\p{N}").removeprefix(f"{_CONTRACTIONS}|"),),
    "youtu": (
        f"[\uac00-\ud7a3\u3131-\u318e]+|{_WIDE_MARKS}|[\u3105-\u312f]+|{_KANJI_AND_KANA}",
        rf"{_cased()}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS_OF_LINES}",
    ),
}  # fmt: skip
"""Ways of cutting that transformers does not know: patterns that cut one after the other what the earlier
ones left (llama.cpp's src/llama-vocab.cpp)."""
_SAME = {
    "bailingmoe": ["bailingmoe2", "llada-moe"],
    "bloom": ["gpt3-finnish", "poro-chat"],
    "chatglm-bpe": ["glm4", "glm5"],
    "deepseek-v3": ["hunyuan-dense", "hy_v4", "joyai-llm"],
    "tiny_aya": ["cohere2moe"],
}
_SPLITTERS |= {other: _SPLITTERS[name] for name, others in _SAME.items() for other in others}
_SPLITTERS["viking"] = (*_SPLITTERS["bloom"], r"\p{N}")
WITH_BEGINNING = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken",
}  # fmt: skip
"""Ways of cutting of vocabularies with a token that texts begin with, unless a file says otherwise."""
_WITHOUT_MERGES = WITH_BEGINNING | {
    "chatglm-bpe", "glm4", "glm5", "hunyuan", "kimi-k2", "minicpm5", "youtu",
}  # fmt: skip
"""Ways of cutting whose pieces are taken whole where they are tokens, whatever merges would make: as
tiktoken always does, by which GLM's, Hunyuan's and Kimi's vocabularies are read at home."""
_COMPOSED = {"qwen2", "qwen35", "command-r", "mpt", "olmo"}
"""Ways of cutting of vocabularies whose own tokenizers compose letters and their marks first (NFC), which
no file says and llama.cpp does not do."""
_DIGIT_SPLITTERS = {
    "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2",
}  # fmt: skip
"""Splitters like GPT-2's, with each digit apart; transformers would take GPT-2's."""
_GPT2_SPLITTERS = {
    "default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe", "exaone4", "trillion",
    "a.x-4.0", "gigachat", "granite-docling", "mellum",
}  # fmt: skip


def split(backend: Any, splitter: str | None, known: Mapping[str, str]) -> None:
    """Has a tokenizer cut text as its vocabulary was trained, by the name of the way ("pre"). ``known``:
    ways that have been seen to. One that is unknown is GPT-2's, with a warning."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    if splitter in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.model.ignore_merges = splitter in _WITHOUT_MERGES
    if splitter in _DIGIT_SPLITTERS:
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)]
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif splitter in _SPLITTERS:
        steps = [pre_tokenizers.Split(Regex(each), "isolated") for each in _SPLITTERS[splitter]]
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        if splitter is not None and splitter not in known and splitter not in _GPT2_SPLITTERS:
            logger.warning(
                "the file's way of cutting text, %r, is unknown here: GPT-2's is taken, and token ids "
                "may be others than those that the model was trained with",
                splitter,
            )
        return
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytewise])
