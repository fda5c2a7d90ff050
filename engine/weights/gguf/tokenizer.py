"""The tokenizer in a GGUF file, with its special tokens, chat template and the tokens that end a text.

transformers' own way from a file to a tokenizer loads torch, which the server's process does without;
its way from the file's metadata to a tokenizer does not, and is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.request.errors import UnsupportedModelError
from engine.weights.gguf.file import GgufHeader
from engine.weights.gguf.splitters import WITH_BEGINNING, split

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens, as transformers and as a GGUF file call them."""
_ENDS = ("eos", "eot", "eom")
_NAMES_OF_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<turn|>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "<end_of_utterance>",
    "<|flush|>", "<|calls|>", "<eos>", "[EOS]", "[EOT]", "[e~[",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}  # fmt: skip
"""Control tokens that end a text wherever they are: files leave it to llama.cpp to know them by name
(src/llama-vocab.cpp, special_eog_ids)."""
_ENDS_OF_CHANNELS = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
_CALLS_FOLLOW = "<|tool_response>"
"""Gemma 4 ends its calls of tools so, whatever kind a file says."""
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_MARK = "\u2581"
_BUILT_AS = {"gemma3n": "gemma3", "gemma-embedding": "gemma3", "phimoe": "phi3"}
"""Architectures whose vocabulary transformers builds by another's rules."""


def gguf_tokenizer(header: GgufHeader, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a file. ``chat_template``: in place of the file's.

    Raises UnsupportedModelError where the file has no tokenizer or one that does not fit together,
    ValueError for a kind that transformers does not build."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
        GGUF_TOKENIZER_MAPPING,
        convert_gguf_tokenizer,
    )

    tokens = _tokens(header)
    names = GGUF_TOKENIZER_MAPPING["tokenizer"]
    parts = _parts(header.metadata, names)
    kind, splitter = parts.get("tokenizer_type"), parts.get("pre_tokenizer_type")
    plain = _take_plain(parts) if kind == "gpt2" else {}
    runs = _take_runs(parts)
    if kind == "llama" and len({*parts.get("scores", ())}) == 1:
        parts["scores"] = _scores(tokens)
    converted, _ = convert_gguf_tokenizer(
        _BUILT_AS.get(header.architecture, header.architecture), parts
    )
    backend = _put_plain(_only_own(converted, len(tokens)), plain)
    _match_whole(backend, runs)
    if kind == "gpt2":
        split(backend, splitter, GGUF_PRE_TOKENIZER_SPLITS)
    if kind == "llama" and header.architecture in ("phi3", "phimoe"):
        backend = _take_space_behind(backend)
    if kind == "llama":
        _begin(backend, parts.get("add_prefix_space"))
    options = _parts(header.metadata, GGUF_TOKENIZER_MAPPING["tokenizer_config"])
    if kind == "llama" or (kind == "gpt2" and splitter in WITH_BEGINNING):
        # As llama.cpp takes files that do not say.
        options.setdefault("add_bos_token", True)
    if kind == "gemma4":
        # Early files deny it, and its models write nothing sensible without.
        options["add_bos_token"] = True
    if chat_template is not None:
        options["chat_template"] = chat_template
    elif named := _named_templates(header.metadata):
        options["chat_template"] = {"default": options["chat_template"], **named}
    infill = [_special_id(header, f"fim_{name}") for name in ("pre", "suf", "mid")]
    if None not in infill:
        options["infill_tokens"] = [[tokens[each] for each in infill if each is not None]]
    for name, stored in _SPECIAL.items():
        found = _special_id(header, stored)
        options[f"{name}_token"] = None if found is None else tokens[found]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **options
    )


def end_token_ids(header: GgufHeader) -> tuple[int, ...]:
    """Returns every token that ends a text: the file's end tokens and those known by name."""
    found = {_special_id(header, name) for name in _ENDS}
    kinds = header.metadata.get("tokenizer.ggml.token_type", ())
    named = {}
    for number, (token, kind) in enumerate(zip(_tokens(header), kinds, strict=False)):
        if (kind == _CONTROL and token in _NAMES_OF_ENDS) or token == _CALLS_FOLLOW:
            named[token] = number
    if any(named.keys() >= ends for ends in _ENDS_OF_CHANNELS):
        # Where these end a text, "<|end|>" of gpt-oss and Solar only ends a part of it, as reasoning.
        found.discard(named.pop("<|end|>", None))
    found.update(named.values())
    return tuple(sorted(number for number in found if number is not None))


def _parts(metadata: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {
        name: metadata[f"tokenizer.{stored}"]
        for stored, name in names.items()
        if f"tokenizer.{stored}" in metadata
    }


def _named_templates(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the chat templates beside the usual one: for tools, say."""
    names, key = metadata.get("tokenizer.chat_templates", ()), "tokenizer.chat_template"
    return {name: metadata[f"{key}.{name}"] for name in names if key in metadata}


def _tokens(header: GgufHeader) -> Sequence[str]:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise UnsupportedModelError("the file holds no tokenizer (tokenizer.ggml.tokens)")
    return tokens


def _special_id(header: GgufHeader, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    number = header.metadata.get(key)
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(_tokens(header)):
        raise UnsupportedModelError(f"its {key} is {number!r}, which is none of its tokens")
    return number


def _only_own(backend: Any, num_tokens: int) -> Any:
    """Returns it without tokens beyond the file's: transformers' classes add their families' usual
    ones, for which no model has embeddings."""
    if backend.get_vocab_size(with_added_tokens=True) <= num_tokens:
        return backend
    parts = json.loads(backend.to_str())
    parts["added_tokens"] = [each for each in parts["added_tokens"] if each["id"] < num_tokens]
    return type(backend).from_str(json.dumps(parts))


def _take_plain(parts: dict[str, Any]) -> dict[int, tuple[str, int]]:
    """Returns tokens that stand whole in texts and are not spelled in bytes' letters, with their kinds:
    DeepSeek's, and runs of spaces. transformers would spell them so, and find none of them; it gets names
    in their places."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters, kinds = set(bytes_to_unicode().values()), list(parts.get("token_type", ()))
    tokens, plain = list(parts["tokens"]), {}
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind in (_CONTROL, _USER_DEFINED) and not set(token) <= letters:
            plain[number] = token, kind
            tokens[number], kinds[number] = f"<|plain|{number}|>", _NORMAL
    parts["tokens"], parts["token_type"] = tokens, kinds
    return plain


def _put_plain(backend: Any, plain: Mapping[int, tuple[str, int]]) -> Any:
    """Returns it with such tokens under their numbers."""
    from tokenizers import AddedToken

    if not plain:
        return backend
    said = json.loads(backend.to_str())
    numbers = said["model"]["vocab"]
    for number, (token, _) in plain.items():
        numbers[token] = numbers.pop(f"<|plain|{number}|>")
    backend = type(backend).from_str(json.dumps(said))
    for token, kind in plain.values():
        is_special = kind == _CONTROL
        add = backend.add_special_tokens if is_special else backend.add_tokens
        add([AddedToken(token, normalized=False, special=is_special)])
    return backend


def _take_runs(parts: dict[str, Any]) -> list[str]:
    """Returns the user-defined runs of spaces in sentencepiece's spelling. Where the file spells them so,
    transformers is not told what they are: it would add them to no effect, and nothing is added twice."""
    kinds, runs = list(parts.get("token_type", ())), []
    for number, (token, kind) in enumerate(zip(parts["tokens"], kinds, strict=False)):
        if kind == _USER_DEFINED and token and not token.strip(f" {_MARK}"):
            runs.append(token.replace(" ", _MARK))
            kinds[number] = _NORMAL if _MARK in token else kind
    parts["token_type"] = kinds
    return runs


def _scores(tokens: Sequence[str]) -> list[float]:
    """Returns the order of merges where a file has one score for all, as llama.cpp's conversion of a
    tokenizer.json writes: that of the tokens, with runs of spaces last, as in Llama's and Mistral's."""
    return [-float(number) if token.strip(_MARK) else -1e9 for number, token in enumerate(tokens)]


def _match_whole(backend: Any, runs: Iterable[str]) -> None:
    """Has runs of spaces matched whole and longest first, before anything is merged, as sentencepiece and
    llama.cpp do: 40 spaces are 31 and 9. Merges alone would make 16 and 24 of them. Where a space is put
    before texts, it would be put before such a run too, which then is found in longer ones alone."""
    from tokenizers import AddedToken, normalizers

    if not isinstance(backend.normalizer, normalizers.Replace):
        return
    known = [each for each in runs if backend.token_to_id(each) is not None]
    backend.add_tokens([AddedToken(each, normalized=True, special=False) for each in known])


def _begin(backend: Any, with_space: bool | None) -> None:
    """Puts a space before texts and before what stands behind special tokens, as sentencepiece does,
    unless the file says that there is none. transformers puts it before a whole text alone, and not where
    there is one already. That is left where a file says that there is one: it does where the model asks
    transformers for it (add_prefix_space), as Mistral 7B v0.3.
    """
    from tokenizers import decoders, normalizers, pre_tokenizers

    if not isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace) or with_space:
        return
    if with_space is None:
        steps = [normalizers.Prepend(_MARK), normalizers.Replace(" ", _MARK)]
        backend.normalizer, backend.pre_tokenizer = normalizers.Sequence(steps), None
        return
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )


def _take_space_behind(backend: Any) -> Any:
    """Returns it with Phi 3's special tokens as its vocabulary has them, with the white space behind
    them. No file says so; llama.cpp goes by the model's name."""
    said = json.loads(backend.to_str())
    for each in said["added_tokens"]:
        each["rstrip"] = each["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    return type(backend).from_str(json.dumps(said))
