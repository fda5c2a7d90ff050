"""The scaled copy must write what the original writes, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from bench import scaled_model
from bench.scaled_model import build_scaled_copy
from engine import names
from engine.names import bundled_path


def tiny_model(tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
    model = model.to(torch.bfloat16)
    # The cast also rounds the rotary frequencies, which loading a saved model does not.
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.eval()


@torch.inference_mode()
def assert_same(small: LlamaForCausalLM, large: LlamaForCausalLM, ids: torch.Tensor) -> None:
    """In bf16, in whose last place longer sums may round differently, and then in float32."""
    a, b = (model(input_ids=ids).logits.float() for model in (small, large))
    assert (a - b).abs().max() <= 0.04 * a.abs().max()
    top = a.topk(2).values
    clear = top[..., 0] - top[..., 1] > 2 * (a - b).abs().amax(-1)
    assert clear.float().mean() > 0.75
    assert torch.equal(a.argmax(-1)[clear], b.argmax(-1)[clear])
    a, b = (model.float()(input_ids=ids).logits for model in (small, large))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(a.abs().max()))
    assert torch.equal(a.argmax(-1), b.argmax(-1))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("width", [1, 4])
def test_scaled_copy_computes_the_same_function(tied: bool, width: int) -> None:
    small = tiny_model(tied)
    large = build_scaled_copy(small, width=width, num_layers=5)
    assert_same(small, large, torch.randint(0, 96, (2, 120)))


def test_shape_of_the_scaled_copy() -> None:
    small = tiny_model()
    large = build_scaled_copy(small, min_params=2_000_000)
    assert sum(p.numel() for p in large.parameters()) >= 2_000_000
    assert large.config.num_key_value_heads == small.config.num_key_value_heads
    assert large.config.head_dim == small.config.head_dim
    assert large.lm_head.weight.data_ptr() == large.model.embed_tokens.weight.data_ptr()
    extra = large.model.layers[-1]
    assert not any(proj.weight.any() for proj in (extra.self_attn.o_proj, extra.mlp.down_proj))
    for proj in (extra.self_attn.q_proj, extra.mlp.gate_proj, extra.mlp.up_proj):
        assert (proj.weight != 0).float().mean() > 0.99


@pytest.mark.parametrize(("width", "layers"), [(2, 2), (3, 2), (0, 2), (4, 1)])
def test_unsupported_sizes_are_refused(width: int, layers: int) -> None:
    with pytest.raises(ValueError, match="must"):
        build_scaled_copy(tiny_model(), width=width, num_layers=layers)


@pytest.mark.slow
def test_bundled_models_write_the_same_text_when_scaled() -> None:
    folder = bundled_path("target")
    tok = AutoTokenizer.from_pretrained(folder)
    small = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    large = build_scaled_copy(small, num_layers=small.config.num_hidden_layers + 1)
    ids = torch.tensor([tok(Path(scaled_model.__file__).read_text()[:4000])["input_ids"]])
    assert ids[0, 0] == tok.bos_token_id
    assert_same(small, large, ids)


def test_missing_bundled_model_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(names, "BUNDLED", tmp_path)
    with pytest.raises(FileNotFoundError, match="draft"):
        bundled_path("draft")
