"""Loading: what is served, what is refused at start, and with which reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers.models.qwen2_moe import modeling_qwen2_moe

from bench.census import tiny_config as census_config
from engine.batch import ForwardOutput
from engine.build import build_engine, build_engine_for
from engine.config import EngineConfig
from engine.kernels.grouped_weight import GroupedWeight
from engine.model import quantization, selfcheck
from engine.model.loader import (
    attach_attention,
    eos_token_ids,
    load_model,
    load_tokenizer,
    max_position,
    prepare_model,
    refuse_unservable,
    resolve_dtype,
    sampling_defaults,
)
from engine.model.selfcheck import check_logits, logit_errors, reference_logits
from engine.request.errors import UnsupportedModelError
from engine.request.info import SAMPLED
from engine.states.operator import OPERATORS
from engine.weights.rounding.int8 import is_exact, quantize_weight
from worlds.changed_folders import configure
from worlds.tiny_models import CPU, VOCAB_SIZE, enlarge, make_runner, tiny_config, tiny_model


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (hf.T5Config(), "t5 is an encoder-decoder; only causal LMs are served"),
        (hf.LlavaConfig(), "llava has more parts than text; its text half is served alone"),
        (hf.DeepseekV32Config(), "deepseek_v32 has layers of kind indexed_attention"),
        (hf.FalconConfig(alibi=True), "falcon adds ALiBi biases"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_configuration_that_rules_itself_out_is_refused(config: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        refuse_unservable(config)


def test_a_model_off_the_attention_interface_is_refused() -> None:
    bloom = hf.BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=1, n_head=2)
    falcon = hf.FalconConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    for config in (bloom, falcon):
        model = hf.AutoModelForCausalLM.from_config(config)
        with pytest.raises(UnsupportedModelError, match="ForCausalLM does not use .* interface"):
            attach_attention(prepare_model(model, CPU))


class Forgetful(hf.LlamaForCausalLM):
    """Takes no notice of which rows' logits are wanted."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **_: Any) -> Any:
        return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=False)


class Stateful(hf.LlamaForCausalLM):
    """Adds a running mean over the rows of the call: memory that is not keys and values."""

    share = 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        counts = torch.arange(1, output.logits.shape[1] + 1)[None, :, None]
        output.logits = output.logits + self.share * output.logits.cumsum(1) / counts
        return output


class Unpositioned(hf.LlamaForCausalLM):
    """Counts positions by itself, from 0 at every call."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        assert position_ids is None or position_ids.ndim == 2
        return super().forward(*args, **kwargs)


def make_fake(kind: type[hf.LlamaForCausalLM]) -> hf.PreTrainedModel:
    model = kind(tiny_config("llama"))
    model.load_state_dict(tiny_model("llama").state_dict())
    return prepare_model(model, CPU)


SMALL_ENGINE = EngineConfig(num_blocks=32, block_size=4, max_num_batched_tokens=8, max_num_seqs=2)
IN_8_BITS = pytest.param(
    "int8", marks=pytest.mark.skipif(not is_exact(), reason="this CPU has no VNNI")
)


def build(model: hf.PreTrainedModel, kind: Any = None) -> None:
    build_engine_for(model, None, replace(SMALL_ENGINE, quantization=kind))


@pytest.mark.parametrize("bits", [None, IN_8_BITS])
@pytest.mark.parametrize("kind", [Forgetful, Stateful, Unpositioned])
def test_a_model_that_keeps_other_state_is_found_out(
    kind: type[hf.LlamaForCausalLM], bits: str | None
) -> None:
    """Nothing in its configuration says so; only its logits do."""
    with pytest.raises(UnsupportedModelError, match="differ .* it must keep state"):
        build(make_fake(kind), bits)


class SlightlyStateful(Stateful):
    """Keeps so little that rounding to 8 bits changes logits as much."""

    share = 0.05


@pytest.mark.skipif(not is_exact(), reason="this CPU has no VNNI")
def test_rounding_hides_no_state_and_is_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both change logits beyond what types of 16 bits may; only one is refused."""
    rounding = []
    compare = selfcheck.logit_errors

    def noted(runner: Any, reference: torch.Tensor) -> dict[str, float]:
        errors = compare(runner, reference)
        rounding.extend(errors.values())
        return errors

    monkeypatch.setattr(selfcheck, "logit_errors", noted)
    build(rough(tiny_model("llama")), "int8")
    before, after = rounding[:2], rounding[2:]
    assert max(before) < 1e-3 < 0.03 < min(after)
    with pytest.raises(UnsupportedModelError, match="it must keep state"):
        build(rough(make_fake(SlightlyStateful)), "int8")


def rough(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """With weights that eight bits describe badly: in each group one is far above the others."""
    with torch.no_grad():
        for module in model.modules():
            if type(module) is torch.nn.Linear:
                module.weight[:, ::32] *= 30
    return model


@pytest.mark.skipif(not is_exact(), reason="this CPU has no VNNI")
def test_what_does_not_survive_rounding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(weight: torch.Tensor) -> GroupedWeight:
        found = quantize_weight(weight)
        return found._replace(codes=found.codes.roll(1, 0))

    monkeypatch.setattr(quantization, "quantize_weight", spoilt)
    with pytest.raises(UnsupportedModelError, match="does not survive rounding to 8 bits"):
        build(tiny_model("llama"), "int8")


def test_a_model_that_looks_ahead_is_found_out() -> None:
    with pytest.raises(UnsupportedModelError, match="its logits differ from transformers' own"):
        build(tiny_model("gemma3", use_bidirectional_attention=True))


def test_layers_that_share_a_number_are_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(UnsupportedModelError, match="two attention layers .* number 0"):
        attach_attention(model)


def test_a_layer_with_a_state_of_an_unknown_function_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(OPERATORS, "mamba_selective_scan")
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2}
    model = hf.AutoModelForCausalLM.from_config(hf.MambaConfig(**sizes))
    expected = "layer backbone.layers.0.mixer keeps a state by mamba_selective_scan,"
    with pytest.raises(UnsupportedModelError, match=expected):
        attach_attention(model)


def test_the_check_of_logits_sees_a_tree_that_goes_wrong() -> None:
    model = tiny_model("mistral")
    reference = reference_logits(model)
    runner = make_runner(model, exact=True)
    check_logits(runner, reference)
    with pytest.raises(UnsupportedModelError, match="run in chunks"):
        check_logits(runner, reference.roll(1, 0))
    wrong = reference.clone()
    reached = []

    def forward(batch: Any) -> ForwardOutput:
        output = type(runner).forward(runner, batch)
        if any(request.parents for request in batch.requests):
            reached.append(batch)
            return ForwardOutput(output.logits.roll(1, 0))
        return output

    runner.forward = forward  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModelError, match="run in a draft tree"):
        check_logits(runner, wrong)
    assert reached


@torch.inference_mode()
def test_the_check_of_logits_reads_no_padding() -> None:
    """Its embedding is zeros: a router takes any experts, and transformers' own may be others."""
    model = tiny_model("qwen3_moe")
    embedding: Any = model.get_input_embeddings()
    read: list[torch.Tensor] = []
    embedding.register_forward_pre_hook(lambda _, values: read.append(values[0]))
    reference_logits(model)
    embedding.padding_idx = padding = int(read[0][0, 3])
    embedding.weight[padding] = 0
    reference = reference_logits(model)
    assert read[0].shape == read[1].shape
    assert padding not in read[1].tolist()[0]
    assert read[1].max() < embedding.num_embeddings
    check_logits(make_runner(model, exact=True), reference)


def test_shapes_are_what_the_layers_hand_over() -> None:
    (first, second) = attach_attention(tiny_model("deepseek_v3"))
    assert first == second
    assert (first.num_heads, first.num_kv_heads) == (4, 4)
    # Multi-head latent attention: keys have a rotary part that values lack.
    assert (first.key_dim, first.value_dim) == (24, 12)


# --- folders ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bf16 checkpoint with a word-level tokenizer."""
    tiny_model("llama", torch.bfloat16).save_pretrained(tmp_path)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "draft": 3, "verify": 4}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_loads_with_its_weights_and_tokenizer(folder: Path) -> None:
    assert (folder / "model.safetensors").exists()
    model = load_model(str(folder), CPU, "bfloat16")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    saved = tiny_model("llama", torch.bfloat16).state_dict()
    assert model.state_dict().keys() == saved.keys()
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    assert load_tokenizer(str(folder))("verify draft nothing")["input_ids"] == [4, 3, 0]


@pytest.mark.parametrize(
    "said",
    [
        {"_attn_implementation": "flash_attention_2", "use_kernels": True},
        {"attn_implementation": "somebody/kernels", "experts_implementation": "somebody/kernels"},
        {"_attn_implementation_internal": "paged|flash_attention_3"},
        {"_experts_implementation": "somebody/kernels"},
        {"auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "code.Class")},
    ],
    ids=lambda each: next(iter(each)),
)
def test_no_configuration_chooses_code(folder: Path, said: dict[str, Any]) -> None:
    configure(folder, **said)
    (folder / "code.py").write_text("raise SystemExit('run')")
    config: Any = load_model(str(folder), CPU, "bfloat16").config
    assert config._attn_implementation == "sdpa"
    assert config._experts_implementation in ("eager", "grouped_mm")


def test_a_chat_template_that_is_the_processors_alone_is_read(folder: Path) -> None:
    """Older models that also take images have none in their tokenizer's files."""
    assert load_tokenizer(str(folder)).chat_template is None
    path = folder / "chat_template.json"
    path.write_text('{"chat_template": "{{ messages }}"}')
    assert load_tokenizer(str(folder)).chat_template == "{{ messages }}"
    for text in ("{", "[]", '{"chat_template": 1}'):
        path.write_text(text)
        with pytest.raises(UnsupportedModelError, match=f"cannot load '{folder}'"):
            load_tokenizer(str(folder))


def test_dtypes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_model(str(folder), CPU, "float32").dtype == torch.float32
    assert load_model(str(folder), CPU, "bfloat16").dtype == torch.bfloat16
    for supported, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(
            torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda supported=supported: supported
        )
        assert load_model(str(folder), CPU, "auto").dtype == expected
    assert resolve_dtype("auto", torch.device("cuda")) == "auto"
    for wrong in ("int8", "float64", "nonsense"):
        with pytest.raises(UnsupportedModelError, match=f"dtype '{wrong}' is not one of auto"):
            resolve_dtype(wrong, CPU)


def test_an_engine_built_from_a_folder_knows_its_end_of_text(folder: Path) -> None:
    engine, tokenizer = build_engine(
        EngineConfig(
            model=str(folder), num_blocks=32, block_size=4, max_num_batched_tokens=8, max_num_seqs=2
        )
    )
    assert engine.info.model == str(folder)
    assert engine.info.vocab_size == VOCAB_SIZE
    # The model names none; the tokenizer does.
    assert engine.info.eos_token_ids == (tokenizer.eos_token_id,) == (2,)


def test_a_folder_without_a_causal_lm_or_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """The configuration is judged before a weight is read."""
    for text in ("{}", '{"model_type": "no_such_kind"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnsupportedModelError, match=f"cannot load '{tmp_path}'.*model"):
            load_model(str(tmp_path), CPU)
    others = {"CLIPTextConfig": hf.CLIPTextConfig, "indexed_attention": hf.DeepseekV32Config}
    for reason, config in others.items():
        config().save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModelError, match=reason):
            load_model(str(tmp_path), CPU)
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises((UnsupportedModelError, OSError), match=f"cannot load '{tmp_path}'"):
        load_tokenizer(str(tmp_path))


# --- what the configuration says ---


def test_end_of_text_ids_from_generation_config_model_or_tokenizer() -> None:
    model = tiny_model("llama")
    assert eos_token_ids(model, None) == ()
    model.config.eos_token_id = 5
    assert eos_token_ids(model, None) == (5,)
    model.generation_config.eos_token_id = [7, 9]
    assert eos_token_ids(model, None) == (7, 9)


@pytest.mark.parametrize(
    ("said", "greedy"),
    [
        ({"do_sample": True, "top_k": 20, "min_p": 0.1, "max_new_tokens": 9}, None),
        ({"temperature": "hot", "top_p": -5}, None),
        ({"do_sample": False, "top_p": 0.9, "repetition_penalty": 2}, {"repetition_penalty": 2}),
    ],
)
def test_sampling_defaults_are_what_the_generation_config_says_unchecked(
    tmp_path: Path, said: dict[str, Any], greedy: dict[str, Any] | None
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    expected = {name: value for name, value in said.items() if name in SAMPLED}
    found = sampling_defaults(load_model(str(tmp_path), CPU))
    assert found == (expected if greedy is None else {"temperature": 0, **greedy})


def test_layers_that_share_keys_and_values_share_a_store_s_rows() -> None:
    config = hf.Gemma3nTextConfig(
        vocab_size=VOCAB_SIZE,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=[32] * 4,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    model = hf.Gemma3nForCausalLM(config)
    shapes = attach_attention(prepare_model(model, CPU))
    assert [shape.source for shape in shapes] == [None, None, 0, 1]
    assert [shape.row for shape in shapes[2:]] == [0, 1]


def with_windows(kind: str, window: int) -> hf.PreTrainedModel:
    """A model of one of the types whose windows transformers has in masks alone."""
    config = census_config(kind)
    config.max_position_embeddings, config.sliding_window = 400, window
    if kind == "qwen2_moe":
        kinds = ("sliding_attention", "full_attention")
        config.layer_types = [kinds[layer % 2] for layer in range(config.num_hidden_layers)]
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    enlarge(model)
    return prepare_model(model, CPU)


@pytest.mark.parametrize("kind", ["phimoe", "qwen2_moe"])
def test_windows_that_are_in_masks_alone_are_kept(kind: str) -> None:
    wide, narrow = (reference_logits(with_windows(kind, window)) for window in (400, 5))
    assert not torch.allclose(wide, narrow, atol=0.1)
    errors = logit_errors(make_runner(with_windows(kind, 5), exact=True), narrow)
    assert 0 < max(errors.values()) < 1e-4


@pytest.mark.parametrize(("window", "is_served"), [(100, False), (400, True)])
def test_windows_that_nothing_says_are_refused_where_a_text_may_be_longer(
    window: int, is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("create_causal_mask", "create_sliding_window_causal_mask"):
        monkeypatch.setattr(modeling_qwen2_moe, each, lambda **_: None)
    model = with_windows("qwen2_moe", window)
    if is_served:
        assert len(attach_attention(model)) == model.config.num_hidden_layers
        return
    with pytest.raises(UnsupportedModelError, match="do not say their window of 100 tokens"):
        attach_attention(model)


def test_a_model_with_chunks_has_the_length_of_the_first() -> None:
    """Its rows see all before them until then, and the call's rows count as positions."""
    config = hf.Llama4TextConfig(attention_chunk_size=512, floor_scale=900)
    assert max_position(config) == 512
    config.floor_scale = 400
    assert max_position(config) == 399


@pytest.mark.parametrize(("factor", "length"), [(4.0, 1024), (1.5, 400)])
def test_a_model_that_had_yarn_added_has_the_length_that_it_reaches(
    factor: float, length: int
) -> None:
    """As Qwen's authors tell people to add it: what the configuration says besides stays."""
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 256}
    config = tiny_config("llama", max_position_embeddings=400, rope_parameters=yarn)
    assert max_position(config) == length


def test_positions_end_where_rotary_frequencies_would_follow_the_longest_neighbour() -> None:
    """transformers gives LongRoPE models other frequencies once any position of the call passes the
    original length: a request's tokens would depend on who shares its step."""
    assert max_position(tiny_config("llama")) == 256
    assert max_position(tiny_config("phi3_longrope")) == 64
    per_kind = tiny_config("gemma3")
    per_kind.rope_parameters["full_attention"] = {
        "rope_type": "dynamic",
        "original_max_position_embeddings": 128,
    }
    assert max_position(per_kind) == 128
    assert max_position(tiny_config("gpt2")) == 256
    assert max_position(hf.BloomConfig()) == 4096  # says nothing
