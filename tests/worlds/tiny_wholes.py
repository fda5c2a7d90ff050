"""Tiny random models of text and images, as transformers saves them: with their text half below names of
the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from worlds.tiny_models import VOCAB_SIZE, WINDOW, enlarge, tiny_config

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 8,
}
_QWEN_TEXT: dict[str, Any] = {
    name: value
    for name, value in tiny_config("llama").to_dict().items()
    if name.startswith(("num_", "max_", "vocab_size", "hidden_size", "intermediate_size", "bos_"))
} | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
_QWEN_MARKS = dict.fromkeys(("image_token_id", "video_token_id"), 90)


def _clip() -> Any:
    return hf.CLIPVisionConfig(**_VISION, projection_dim=32)


def _qwen_2_5_vl() -> Any:
    """Its head is its embedding, as the whole's configuration alone says."""
    vision = _QWEN_VISION | {"fullatt_block_indexes": [0]}
    return hf.Qwen2_5_VLConfig(
        text_config=_QWEN_TEXT, vision_config=vision, tie_word_embeddings=True, **_QWEN_MARKS
    )


def _qwen_3_vl() -> Any:
    vision = _QWEN_VISION | {"deepstack_visual_indexes": [0]}
    text = _QWEN_TEXT | {"head_dim": 16}
    return hf.Qwen3VLConfig(text_config=text, vision_config=vision, **_QWEN_MARKS)


def _qwen_3_vl_moe() -> Any:
    vision = _QWEN_VISION | {"deepstack_visual_indexes": [0]}
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    text = _QWEN_TEXT | {"head_dim": 16} | experts
    return hf.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **_QWEN_MARKS)


_CONFIGS: dict[str, Callable[[], Any]] = {
    # Its layers have windows, and its head is its embedding.
    "gemma3": lambda: hf.Gemma3Config(
        text_config=tiny_config("gemma3"),
        vision_config=hf.SiglipVisionConfig(**_VISION),
        mm_tokens_per_image=4,
        image_token_index=90,
    ),
    "llava": lambda: hf.LlavaConfig(
        text_config=tiny_config("llama"), vision_config=_clip(), image_token_index=90
    ),
    "mistral3": lambda: hf.Mistral3Config(
        text_config=tiny_config("mistral"),
        vision_config=hf.PixtralVisionConfig(**_VISION),
        image_token_index=90,
        tie_word_embeddings=False,
    ),
    # Positions of three axes; the checkpoint's names have no prefix.
    "qwen2_5_vl": _qwen_2_5_vl,
    "qwen3_vl": _qwen_3_vl,
    # Experts that are stored otherwise than they are computed.
    "qwen3_vl_moe": _qwen_3_vl_moe,
    "internvl": lambda: hf.InternVLConfig(
        text_config=tiny_config("qwen2"),
        vision_config=_VISION | {"image_size": [16, 16], "patch_size": [8, 8]},
        image_token_id=90,
    ),
    "qwen2_audio": lambda: hf.Qwen2AudioConfig(
        text_config=tiny_config("qwen2"),
        audio_config={
            "d_model": 32,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 8,
        },
        audio_token_index=90,
    ),
    "smolvlm": lambda: hf.SmolVLMConfig(
        text_config=tiny_config("llama"), vision_config=_VISION, image_token_id=90
    ),
    "idefics3": lambda: hf.Idefics3Config(
        text_config=tiny_config("llama"), vision_config=_VISION, image_token_id=90
    ),
    # Reads prompts in both directions.
    "paligemma": lambda: hf.PaliGemmaConfig(
        text_config=hf.GemmaConfig(**_QWEN_TEXT | {"rope_parameters": None}),
        vision_config=hf.SiglipVisionConfig(**_VISION),
        image_token_index=90,
        projection_dim=64,
    ),
    # Scales the logits of its text half, which its class of all parts leaves out.
    "aya_vision": lambda: hf.AyaVisionConfig(
        text_config=hf.Cohere2Config(
            **_QWEN_TEXT | {"rope_parameters": None},
            logit_scale=0.25,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
        ),
        vision_config=hf.SiglipVisionConfig(**_VISION),
        image_token_index=90,
    ),
}
SERVED = tuple(sorted(_CONFIGS.keys() - {"paligemma", "aya_vision"}))


def tiny_whole(name: str, vocab_size: int = VOCAB_SIZE) -> hf.PreTrainedModel:
    """A fresh model of all parts; the same weights at every call."""
    config = _CONFIGS[name]()
    config.text_config.vocab_size = vocab_size
    torch.manual_seed(11)
    maker: Any = (
        hf.AutoModelForMultimodalLM if name.endswith("audio") else hf.AutoModelForImageTextToText
    )
    model = maker.from_config(config)
    enlarge(model)
    model.eval().requires_grad_(False)
    return model  # type: ignore[no-any-return]
