"""Fill-in-the-middle: the prompt for a text between two others, where the tokenizer has tokens for it."""

from __future__ import annotations

from typing import Any

from server.request.special_tokens import Text

_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("[PREFIX]", "[SUFFIX]"),  # Codestral, which reads the suffix first and has no third token
)
_ENDS = (
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    *("<fim_pad>", "<fim-pad>", "<file_sep>", "▁<EOT>", "<EOT>"),
)


class Infill:
    """``marks``: the tokens' spellings; without any there are none. ``end_ids``: tokens that end what is
    filled in; models write them where the gap or the file ends, and checkpoints seldom say so."""

    def __init__(self, tokenizer: Any) -> None:
        def ids(names: Any) -> list[int]:
            every = [tokenizer.encode(each, add_special_tokens=False) for each in names]
            return [
                each[0] for each in every if len(each) == 1 and each != [tokenizer.unk_token_id]
            ]

        # What a GGUF file's metadata says goes before names that are known.
        families = (*tokenizer.init_kwargs.get("infill_tokens", ()), *_FAMILIES)
        self.marks = next((each for each in families if len(ids(each)) == len(each)), ())
        self.end_ids = tuple(ids((*self.marks, *_ENDS))) if self.marks else ()

    def prompt(self, before: str, after: str, allow_special_tokens: bool) -> Text:
        """Returns the prompt for what stands between two texts."""
        texts = [(allow_special_tokens, before), (allow_special_tokens, after)]
        prefix, suffix, *middle = ((True, each) for each in self.marks)
        if not middle:
            return [suffix, texts[1], prefix, texts[0]]
        return [prefix, texts[0], suffix, texts[1], *middle]
