"""The text half of a model that also takes images or sounds: a causal LM of its own.

transformers nests the configuration of a language model in that of the whole, and checkpoints nest its
weights below a prefix that differs from family to family. No family is known by name here: the prefix is
that below which the checkpoint has the names of the language model, and whether that one alone writes
what the whole would is seen from logits of a text.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import CausalLMOutputWithPast

from engine.request.errors import UnsupportedModelError
from engine.weights.files import read_header, weight_files
from engine.weights.patterns import Patterns

_NUM_TOKENS = 12
_TOLERANCES = {torch.float32: 1e-3}
"""The allowed mean difference of the half's logits from the whole's, relative to their spread."""
_TOLERANCE_OF_NARROW_TYPES = 5e-2
_OF_TEXTS = ("bos_token_id", "eos_token_id")


class TextHalfForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder and a head, where transformers has the decoder of a text half but no causal LM of it."""

    config_class = PreTrainedConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = AutoModel.from_config(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        embedding = _name_of(self, self.get_input_embeddings())
        self._tied_weights_keys = {"lm_head.weight": f"{embedding}.weight"}
        self._supports_attention_backend = self.model._supports_attention_backend
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: torch.Tensor,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Takes what the decoder takes. ``logits_to_keep``: so many last rows (0: all), or indices."""
        output = self.model(input_ids=input_ids, **kwargs)
        kept = logits_to_keep
        rows = slice(-kept or None, None) if isinstance(kept, int) else kept
        names = {each.name for each in fields(CausalLMOutputWithPast)}
        told = {name: value for name, value in output.items() if name in names}
        return CausalLMOutputWithPast(
            logits=self.lm_head(output.last_hidden_state[:, rows]), **told
        )


@dataclass(frozen=True)
class TextHalf:
    """A text half as it is loaded: by ``kind``'s ``from_pretrained`` with ``config``, names of the
    checkpoint replaced by ``key_mapping`` (patterns to what stands in their place). ``unserved``: the
    other parts of ``whole``, the configuration of all."""

    whole: Any
    config: Any
    kind: Any
    unserved: tuple[str, ...]
    key_mapping: dict[str, str] = field(default_factory=dict)

    def check(self, model: PreTrainedModel) -> None:
        """Raises UnsupportedModelError unless the loaded half alone writes what transformers' own model
        of all parts writes after a text, with this half in it. The others get no memory."""
        name, text = type(model).__name__, self._text()
        try:
            theirs = self._logits(_whole_around(self.whole, model), model, text)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{self.whole.model_type} cannot read a text without its other parts: "
                f"{type(error).__name__}: {error}"
            ) from error
        ours = self._logits(model, model, text)
        difference = float((ours - theirs).abs().mean()) / (float(theirs.std()) or 1.0)
        if not difference < _TOLERANCES.get(model.dtype, _TOLERANCE_OF_NARROW_TYPES):
            raise UnsupportedModelError(
                f"{self.whole.model_type} writes other logits of a text than {name}, its text half "
                f"alone: by {difference:.3g} of their spread"
            )

    @staticmethod
    @torch.inference_mode()
    def _logits(reader: nn.Module, model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
        """Returns the logits ``[len(token_ids), vocab_size]`` that ``reader`` writes of a text."""
        ids = torch.tensor([token_ids], device=model.device)
        return reader(input_ids=ids, use_cache=False).logits[0].float()  # type: ignore[no-any-return]

    def _text(self) -> list[int]:
        """Returns a text without the tokens that stand for images and the like."""
        marks = {
            value
            for name, value in vars(self.whole).items()
            if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
        }
        generator = torch.Generator().manual_seed(2)
        ids = torch.randperm(self.config.vocab_size, generator=generator).tolist()
        return [each for each in ids if each not in marks][:_NUM_TOKENS]


def has_text_half(config: Any) -> bool:
    """Returns whether a model's configuration holds that of a language model."""
    return isinstance(getattr(config, "text_config", None), PreTrainedConfig)


def text_of(config: Any) -> Any:
    """Returns the configuration of the text half of a model that has one, else the model's own."""
    is_half = has_text_half(config) and not getattr(config, "is_encoder_decoder", False)
    return config.text_config if is_half else config


def _other_parts(config: Any) -> tuple[str, ...]:
    """Returns what a model has besides its text half, as "vision" and "audio"."""
    found = [
        name.removesuffix("_config")
        for name in type(config).sub_configs
        if name != "text_config" and getattr(config, name, None) is not None
    ]
    return tuple(found)


def find_text_half(model: str, config: Any) -> TextHalf | None:
    """Returns how the text half of a folder is loaded; None where the model is no more than
    that. Reads names of weights, and no weight.

    Raises UnsupportedModelError where there is no causal LM in it, or no weights of one.
    """
    if text_of(config) is config:
        return None
    if _class_of_whole(config) is None:
        raise UnsupportedModelError(
            f"{config.model_type}: transformers has no model of all its parts that writes text"
        )
    text = _text_config(config)
    kind = _class_of_half(config, text)
    names = _names(Path(model))
    own = _without_memory(kind, text)
    prefix, head = _places(own, names, config.model_type)
    says_tied = (getattr(each, "tie_word_embeddings", False) for each in (config, text))
    text.tie_word_embeddings = head is None and any(says_tied)
    renamed = {prefix: own.base_model_prefix}
    if head is not None:
        renamed[head] = _name_of(own, own.get_output_embeddings())
    mapping = {
        rf"^{re.escape(old)}\.": f"{new}." for old, new in renamed.items() if old and old != new
    }
    found = getattr(config, "quantization_config", None) or getattr(
        text, "quantization_config", None
    )
    if found is not None:
        aliases = renamed | _names_in_whole(config, own)
        text.quantization_config = own_names(found, aliases, [n for n, _ in own.named_modules()])
    return TextHalf(config, text, kind, _other_parts(config), mapping)


def own_names(found: Any, aliases: Mapping[str, str], modules: Collection[str] = ()) -> Any:
    """Returns a quantization's description with modules named as the text half names them. ``aliases``:
    beginnings of names in the whole, and what the half has there; ``modules``: the half's, to which
    patterns ("re:") are held that name the whole's."""
    if isinstance(found, Mapping):
        return {_own_name(key, aliases): own_names(v, aliases, modules) for key, v in found.items()}
    if isinstance(found, list | tuple):
        items = [own_names(each, aliases, modules) for each in found]
        return items + [name for each in found for name in _meant(each, aliases, modules)]
    return _own_name(found, aliases)


def _own_name(name: Any, aliases: Mapping[str, str]) -> Any:
    if not isinstance(name, str):
        return name
    for old, new in sorted(aliases.items(), key=lambda each: -len(each[0])):
        path = re.escape(old).replace(r"\.", r"\\?\.")
        begins = re.match(rf"((?:re:|[+-]:)?\^?){path}(?!\w)", name)
        if old and begins:
            return begins[1] + new + name[begins.end() :]
    return name


def _meant(pattern: Any, aliases: Mapping[str, str], modules: Collection[str]) -> Iterator[str]:
    """Yields the modules that a pattern names in the whole, but no longer in the half."""
    if not isinstance(pattern, str) or not pattern.startswith("re:"):
        return
    match, kept = Patterns().match, _own_name(pattern, aliases)[3:]
    for name in modules:
        theirs = [
            old + name.removeprefix(new)
            for old, new in aliases.items()
            if f"{name}.".startswith(f"{new}.")
        ]
        if not match(kept, name) and any(match(pattern[3:], each) for each in theirs):
            yield name


def _text_config(config: Any) -> Any:
    """Returns a configuration of the text half, with what only the whole's says of texts."""
    text = copy.deepcopy(config.text_config)
    for name in _OF_TEXTS:
        if getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    if getattr(text, "dtype", None) is None:
        text.dtype = getattr(config, "dtype", None)
    return text


def _class_of_whole(config: Any) -> Any | None:
    """Returns transformers' class that writes text with all parts."""
    mappings = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
    )
    return next((each[type(config)] for each in mappings if type(config) in each), None)


def _class_of_half(config: Any, text: Any) -> Any:
    """Returns the class that is loaded. Raises UnsupportedModelError where there is none."""
    if getattr(text, "cross_attention_layers", None):
        raise UnsupportedModelError(
            f"{config.model_type} has layers that attend to images; only a text half that needs none "
            "is served"
        )
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(text) in MODEL_MAPPING:
        return TextHalfForCausalLM
    raise UnsupportedModelError(
        f"{config.model_type}: transformers has no causal LM of its text half ({text.model_type})"
    )


def _without_memory(kind: Any, config: Any) -> Any:
    """Returns a model whose tensors have shapes and no values."""
    with torch.device("meta"), no_init_weights():
        if kind is AutoModelForCausalLM:
            return kind.from_config(copy.deepcopy(config))
        return kind._from_config(copy.deepcopy(config))


def _names(folder: Path) -> list[str]:
    """Returns the names of a checkpoint's tensors, from the files that transformers would read."""
    files = weight_files(folder, ("model.safetensors", "pytorch_model.bin"))
    if not files:
        raise UnsupportedModelError(
            "there are no weights in model.safetensors or pytorch_model.bin"
        )
    return [name for file in files for name in read_header(file)]


def _places(own: Any, names: list[str], kind: str) -> tuple[str, str | None]:
    """Returns the modules below which the checkpoint has the decoder and the head; None: it has no head.
    Raises UnsupportedModelError where the decoder is not there."""
    decoder = own.base_model
    embedding = _name_of(decoder, own.get_input_embeddings())
    found = re.compile(rf"(?:(.*)\.)?{re.escape(embedding)}\.\w+")
    places = {match[1] or "" for match in map(found.fullmatch, names) if match}
    if decoder is own or not places:
        raise UnsupportedModelError(f"{kind}: the checkpoint has no {embedding} of its text half")
    wanted, there = decoder.state_dict().keys(), set(names)
    place = max(
        sorted(places), key=lambda each: sum(_below(each, name) in there for name in wanted)
    )
    head = _name_of(own, own.get_output_embeddings())
    above = place.split(".")
    heads = [_below(".".join(above[:end]), head) for end in range(len(above), -1, -1)]
    return place, next((h for h in heads if any(n.startswith(f"{h}.") for n in names)), None)


def _below(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _name_of(model: Any, wanted: Any) -> str:
    """Returns a module's name in the model."""
    name: str
    for name, module in model.named_modules():
        if module is wanted:
            return name
    raise UnsupportedModelError(f"{type(model).__name__} has no embedding or head of its own")


def _place_in(whole: Any, own: Any) -> tuple[str, str]:
    """Returns the names of the decoder and of the head in the whole model. Raises UnsupportedModelError
    where there is not one of each."""
    kind = type(own.base_model)
    names = [name for name, module in whole.named_modules() if type(module) is kind]
    head = whole.get_output_embeddings()
    if len(names) != 1 or head is None:
        raise UnsupportedModelError(
            f"{type(whole).__name__} has {len(names)} parts of the kind {kind.__name__} and "
            f"{'no' if head is None else 'a'} head: its text half cannot be told apart"
        )
    return names[0], _name_of(whole, head)


def _names_in_whole(config: Any, own: Any) -> dict[str, str]:
    """Returns the beginnings of names in transformers' model of all parts, and what the half has there:
    some descriptions of a quantization go by these and not by the checkpoint's."""
    decoder, head = _place_in(_without_memory_whole(config), own)
    names = {decoder: own.base_model_prefix}
    return names | {head: _name_of(own, own.get_output_embeddings())}


def _without_memory_whole(config: Any) -> Any:
    kind: Any = _class_of_whole(config)
    plain = copy.deepcopy(config)
    with torch.device("meta"), no_init_weights():
        return kind._from_config(plain)


def _whole_around(config: Any, model: PreTrainedModel) -> nn.Module:
    """Returns transformers' model of all parts with this text half in it."""
    whole = _without_memory_whole(config)
    decoder, head = _place_in(whole, model)
    whole.set_submodule(decoder, model.base_model)
    whole.set_submodule(head, model.get_output_embeddings())
    # Forwards ask other parts for their device and type.
    empty = nn.Parameter(torch.empty(0, device=model.device, dtype=model.dtype), False)
    for module in whole.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and tensor.is_meta:
                module._parameters[name] = empty
    return whole.eval()  # type: ignore[no-any-return]
