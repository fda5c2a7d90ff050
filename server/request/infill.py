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
_ENDS: tuple[str, ...] = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>")
_ENDS += ("<fim_pad>", "<fim-pad>", "<file_sep>", "▁<EOT>", "<EOT>")


class Infill:
    """``is_known``: whether there are such tokens. ``end_ids``: tokens that end what is filled in; models
    write them where the gap or the file ends, and few checkpoints count them among those that end a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        def ids(names: Any) -> list[int]:
            every = [tokenizer.encode(each, add_special_tokens=False) for each in names]
            return [
                each[0] for each in every if len(each) == 1 and each[0] != tokenizer.unk_token_id
            ]

        # What a GGUF file's metadata says goes before names that are known.
        families = (*tokenizer.init_kwargs.get("infill_tokens", ()), *_FAMILIES)
        self._marks = next((each for each in families if len(ids(each)) == len(each)), ())
        self.is_known = bool(self._marks)
        self.end_ids = tuple(ids((*self._marks, *_ENDS))) if self._marks else ()

    def prompt(self, before: str, after: str, allow_special_tokens: bool) -> Text:
        """Returns the prompt for what stands between two texts."""
        texts = ((allow_special_tokens, before), (allow_special_tokens, after))
        marks = [(True, each) for each in self._marks]
        if len(marks) == 2:
            return [marks[1], texts[1], marks[0], texts[0]]
        return [marks[0], texts[0], marks[1], texts[1], marks[2]]
