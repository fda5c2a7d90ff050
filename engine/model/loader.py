"""Loads a transformers causal LM so that the engine can drive its attention.

Nothing is known of architectures here. What can be served is found out: a model is refused with the
reason if its configuration rules it out, if its layers do not go through transformers' attention
interface or keep a state by functions that are not known, or if the start-up check finds that our
forward, in chunks and under a tree mask, does not write the logits that transformers' own writes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from engine.attention.backend import (
    IMPLEMENTATION,
    KV_LAYER,
    MASK_WINDOW,
    AttentionOptions,
    KVShape,
    attending,
)
from engine.model.quantization import pack_stored
from engine.model.text_half import TextHalf, find_text_half, has_text_half, text_of
from engine.names import BUNDLED as BUNDLED
from engine.names import bundled_path as bundled_path
from engine.names import locate
from engine.request.errors import UnsupportedModelError
from engine.request.info import SAMPLED
from engine.states.seam import StateOperatorError, attach_states, finding_states
from engine.tokenizer import check_folder, naming
from engine.tokenizer import load_tokenizer as load_tokenizer
from engine.weights.checkpoint import load_config, load_weights
from engine.weights.formats import read_places
from engine.weights.gguf.file import find_gguf
from engine.weights.gguf.loading import load_gguf, read_config
from engine.weights.shards import sharding_options
from kvpool.state_store import StateShape

logger = logging.getLogger(__name__)

_ATTENDING = ("full_attention", "sliding_attention")
_SERVED = (*_ATTENDING, "linear_attention")
_IN_CHUNKS = "chunked_attention"
"""Served up to the end of the first chunk, if it is said where that is (``max_position``)."""
_CALL_WIDE_ROPES = {"longrope", "dynamic"}


def resolve_dtype(name: str, device: torch.device) -> torch.dtype | str:
    """ "auto" keeps the checkpoint's type, except that CPUs without bf16 instructions get float32."""
    if name == "auto":
        if device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return torch.float32
        return "auto"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise UnsupportedModelError(f"dtype {name!r} is not one of auto, {', '.join(dtypes)}")
    return dtypes[name]


def load_model(
    model: str,
    device: torch.device,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    num_ranks: int = 1,
    packed: bool = True,
    max_model_len: int | None = None,
) -> PreTrainedModel:
    """Returns the model in eval mode on ``device``, still on transformers' own attention; each of
    several ranks, which load it at the same time, gets its part. ``packed``: a checkpoint's quantized
    weights stay quantized if the device has kernels for them; otherwise they become floats.
    ``max_model_len``: a length that the model must support.

    Raises UnsupportedModelError for an unsupported configuration and for weights that do not match it,
    OSError if there is no such folder or name, or no model in it.
    """
    path = locate(model, revision)
    with naming(model):
        wanted = resolve_dtype(dtype, device)
        gguf = find_gguf(path)
        if gguf is not None:
            if num_ranks > 1:
                raise UnsupportedModelError("the weights of GGUF files are not divided among ranks")
            header, config = read_config(gguf)
            refuse_unservable(config)
            check_length(config, max_model_len)
            loaded = load_gguf(gguf, header, config, wanted, packed)
            return prepare_model(loaded, device, packed)
        check_folder(path, "config.json")
        config = load_config(path, trust_remote_code=trust_remote_code)
        refuse_unservable(text_of(config))
        check_length(text_of(config), max_model_len)
        half = find_text_half(path, config)
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if half is not None:
            config = half.config
            options |= {"kind": half.kind, "key_mapping": half.key_mapping}
        ranks = sharding_options(config, num_ranks)  # knows quantised models by their configuration
        loaded = load_weights(
            path,
            config,
            dtype=wanted,
            quantization_config=read_places(config, None if half is None else half.key_mapping),
            **options,
            **ranks,
        )
        if isinstance(wanted, torch.dtype) and _is_dequantized(config):
            _convert(loaded, wanted)
    prepared = prepare_model(loaded, device, packed)
    if half is not None:
        _adopt(half, prepared)
    return prepared


def _is_dequantized(config: Any) -> bool:
    found = getattr(config, "quantization_config", None)
    given = (
        found.get("dequantize") if isinstance(found, Mapping) else getattr(found, "dequantize", 0)
    )
    return bool(given)


def _convert(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives floats that were never quantized the type of those that were: transformers leaves them as
    they are stored where it dequantizes."""
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for name, each in model.named_parameters():
        if each.is_floating_point() and kept.isdisjoint(name.split(".")):
            each.data = each.data.to(dtype)


def _adopt(half: TextHalf, model: PreTrainedModel) -> None:
    """Checks a loaded text half, and says what is not served."""
    half.check(model)
    vars(model)["unserved_parts"] = half.unserved
    unread = ", ".join(half.unserved) or "nothing"
    logger.info("%s: its text half is served; not read: %s", half.whole.model_type, unread)


def unserved_parts(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns the parts that a model's checkpoint has besides the text half, and that are not served."""
    found: tuple[str, ...] = getattr(model, "unserved_parts", ())
    return found


def prepare_model(
    model: PreTrainedModel, device: torch.device, packed: bool = True
) -> PreTrainedModel:
    """Checks an already built model and moves it to the device. ``packed`` as ``load_model`` takes it."""
    refuse_unservable(model.config)
    model.to(device)  # type: ignore[arg-type]  # its decorator loses the signature
    pack_stored(model, packed)
    model.eval().requires_grad_(False)
    return model


def refuse_unservable(config: Any) -> None:
    """Raises UnsupportedModelError with the reason, if the configuration gives one."""
    kind = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{kind} is an encoder-decoder; only causal LMs are served")
    if has_text_half(config):
        raise UnsupportedModelError(
            f"{kind} has more parts than text; its text half is served alone"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    served = {*_SERVED}
    if getattr(config, "attention_chunk_size", None) is not None:
        served.add(_IN_CHUNKS)
    odd = sorted(each for each in kinds if each.endswith("_attention") and each not in served)
    if odd:
        raise UnsupportedModelError(
            f"{kind} has layers of kind {', '.join(odd)}; served are {', '.join(_SERVED)}, and others "
            "that keep a state by functions that are known"
        )
    if getattr(config, "alibi", False):
        raise UnsupportedModelError(f"{kind} adds ALiBi biases, which draft trees cannot carry")


class ShapeProbe:
    """Stands in for a plan and notes what each attention layer hands over."""

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}
        self.without_window: set[int] = set()
        self._seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        if options.window is None:
            self.without_window.add(layer)
        if layer in self.shapes:
            raise RuntimeError(f"two attention layers call themselves number {layer}")
        num_kv_heads, key_dim = key.shape[1:]
        source = next((own for own, *rows in self._seen if _are_same(rows, (key, value))), None)
        self.shapes[layer] = KVShape(query.shape[1], num_kv_heads, key_dim, value.shape[2], source)
        self._seen.append((layer, key, value))
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def _are_same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether they are views of the same memory, with every part still in use."""
    return all(
        (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())
        for one, other in zip(some, others, strict=True)
    )


@torch.inference_mode()
def attach_attention(model: PreTrainedModel) -> list[KVShape]:
    """Switches the model to the engine's attention, and its operations with a state to the engine's;
    returns each attention layer's shapes. What ``state_shapes`` returns is known then.

    Raises UnsupportedModelError if its layers do not follow.
    """
    attach_states(model)
    model.config._attn_implementation = IMPLEMENTATION
    probe = ShapeProbe()
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    outside = f"{type(model).__name__} does not use transformers' attention interface"
    states: Sequence[StateShape] = ()
    try:
        with attending(probe), finding_states() as states, _masks() as masks:
            model(input_ids=ids, position_ids=positions, use_cache=False)
    except Exception as error:
        reason = f"{type(model).__name__} cannot run on the engine's attention: {error}"
        is_inside = probe.shapes or states or isinstance(error, StateOperatorError)
        raise UnsupportedModelError(reason if is_inside else outside) from error
    layers = sorted(probe.shapes)
    if not layers and not states:
        raise UnsupportedModelError(outside)
    _give_windows(model, probe, masks)
    if not states and "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
        raise UnsupportedModelError(
            f"{type(model).__name__}: its layers of kind linear_attention keep a state, and call no "
            "function for it that is known"
        )
    numbers = {layer: number for number, layer in enumerate(layers)}
    _number_layers(model, numbers)
    vars(model)["state_shapes"] = tuple(states)
    return [
        each if each.source is None else replace(each, source=numbers[each.source])
        for each in map(probe.shapes.__getitem__, layers)
    ]


@contextmanager
def _masks() -> Iterator[list[int | None]]:
    """Notes the windows of the masks that models ask transformers for within the block; None: a mask has
    none."""
    found: list[int | None] = []

    def note(*_: object, local_size: int | None = None, **__: object) -> None:
        found.append(local_size)

    AttentionMaskInterface.register(IMPLEMENTATION, note)
    try:
        yield found
    finally:
        # Without one transformers makes no masks, as long as a model runs.
        AttentionMaskInterface._global_mapping.pop(IMPLEMENTATION, None)


def _give_windows(model: PreTrainedModel, probe: ShapeProbe, masks: Sequence[int | None]) -> None:
    """Gives layers the window that is in their mask alone. Raises UnsupportedModelError where layers have
    one and it is not known: texts of the checks at start are shorter than windows."""
    layers, windows = sorted(probe.shapes), {each for each in masks if each is not None}
    kinds = [
        each for each in getattr(model.config, "layer_types", None) or () if each in _ATTENDING
    ]
    if not kinds and windows and None not in masks:
        kinds = ["sliding_attention"] * len(layers)
    if len(kinds) != len(layers):
        return
    lacking = {
        layer
        for kind, layer in zip(kinds, layers, strict=True)
        if kind == "sliding_attention" and layer in probe.without_window
    }
    window = getattr(model.config, "sliding_window", None)
    if len(windows) == 1:
        (window,) = windows
        for module in model.modules():
            if getattr(module, "layer_idx", -1) in lacking:
                vars(module)[MASK_WINDOW] = window
    elif lacking and window is not None and window < max_position(model.config):
        raise UnsupportedModelError(
            f"{type(model).__name__}: its layers of kind sliding_attention do not say their window of "
            f"{window} tokens"
        )


def _number_layers(model: PreTrainedModel, numbers: Mapping[int, int]) -> None:
    """Tells attention layers their numbers in the store, where others stand between them."""
    if any(layer != number for layer, number in numbers.items()):
        for module in model.modules():
            number = numbers.get(getattr(module, "layer_idx", -1))
            if number is not None:
                vars(module)[KV_LAYER] = number


def state_shapes(model: PreTrainedModel) -> tuple[StateShape, ...]:
    """Returns the shapes of a model's operations with a state, by their numbers."""
    found: tuple[StateShape, ...] = getattr(model, "state_shapes", ())
    return found


def max_position(config: Any) -> int:
    """Returns the number of positions that the model supports.

    YaRN may have been added to a configuration that still says the length before. Some rotary embeddings
    change their frequencies for the whole call once any row of it passes a length. Support ends there:
    otherwise a request's tokens would depend on the other requests of its step. Layers with chunks see
    everything before them until the first chunk ends, and so do layers that scale queries by how far down
    the call they stand.
    """
    lengths = [getattr(config, "max_position_embeddings", None) or 4096]
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *ropes.values()]:  # one for all layers, or one per kind of layer
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        original = rope.get("original_max_position_embeddings") if kind else None
        if kind in _CALL_WIDE_ROPES:
            lengths.append(original or lengths[0])
        elif kind == "yarn" and original and rope.get("factor"):
            lengths[0] = max(lengths[0], original * rope["factor"])
    if _IN_CHUNKS in (getattr(config, "layer_types", None) or ()):
        lengths.append(config.attention_chunk_size)
    if getattr(config, "attn_temperature_tuning", False):
        lengths.append(config.floor_scale - 1)
    return int(min(lengths))


def check_length(config: Any, max_model_len: int | None) -> None:
    """Raises UnsupportedModelError where requests are to grow beyond what the model was made for."""
    most = max_position(config)
    if max_model_len is not None and max_model_len > most:
        raise UnsupportedModelError(
            f"max_model_len is {max_model_len}, but the model was made for {most} tokens"
        )


def eos_token_ids(model: PreTrainedModel, tokenizer: Any | None) -> tuple[int, ...]:
    """Returns every id that ends a text, from the generation config, else the tokenizer."""
    ids = model.generation_config.eos_token_id if model.generation_config else None
    if ids is None:
        ids = getattr(model.config, "eos_token_id", None)
    if ids is None and tokenizer is not None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


def sampling_defaults(model: PreTrainedModel) -> dict[str, Any]:
    """Returns what the generation config says of ``SAMPLED`` parameters, unchecked. One that says not to
    sample means temperature 0, and its truncations nothing."""
    said = model.generation_config
    found = {name: getattr(said, name, None) for name in SAMPLED}
    if getattr(said, "do_sample", None) is False:
        found = {"temperature": 0.0, "repetition_penalty": found["repetition_penalty"]}
    return {name: value for name, value in found.items() if value is not None}
