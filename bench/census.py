"""Asks of every causal LM of transformers whether it is served: builds a tiny random one of each type.

    python -m bench.census                     # all types, into docs/census.md; half an hour
    python -m bench.census llama gemma4_text   # some of them, as lines of JSON

A type is served if an engine can be built around it; ``exact`` is what its start-up checks say. Texts of
several prompts, side by side, are then compared with those that the same engine writes without drafts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.build import build_engine_for
from engine.config import EngineConfig
from engine.model.loader import prepare_model
from engine.process.threaded import AsyncEngine
from engine.request.errors import UnsupportedModelError
from engine.request.params import GenerationRequest, SamplingParams, SpeculativeParams

PAGE = Path(__file__).resolve().parents[1] / "docs" / "census.md"
TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
VOCAB_SIZE, NUM_PROMPTS, NUM_TOKENS = 96, 4, 48
_SECONDS, _TYPES_PER_PROCESS, _MOST_PARAMETERS = 120, 24, 100_000_000
WAYS = {"greedy": ("ngram", 0.0), "sampled": ("suffix", 0.9)}

# What configurations call their sizes, and small ones for them.
_SIZES: dict[str, Any] = (
    dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim"), 64)
    | dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"), 128)
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
    | dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2)
    | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32)
    | dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512)
    | dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head"), 16)
    | dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_head_dim"), 16)
    | dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8)
    | dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "index_head_dim"), 16)
    | dict.fromkeys(("sliding_window", "attention_window_size"), 16)
    | {"num_heads": 4, "num_routed_experts": 4, "expert_ffn_size": 32, "encoder_layers": 2}
    | {"num_key_value_heads": 2, "encoder_attention_heads": 4, "max_sequence_length": 512}
    | {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    | {"qk_head_dim": 24, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"mamba_d_ssm": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    | {"is_decoder": True}
    | {"vocab_size": VOCAB_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE}
    | {"hidden_size_per_layer_input": 8, "index_n_heads": 2, "index_topk": 8}
)
_LISTS = ("layers_block_type", "block_types", "hybrid_override_pattern", "mlp_layer_types")
_MORE_LISTS = ("layer_types", "attention_types", "hybrid_layer_ids")
_LATENT = (
    "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa longcat_flash minicpm3 "
    "youtu kimi_linear bailing_hybrid sarvam_mla"
)
_SHARING: dict[str, Any] = {
    "num_kv_shared_layers": 2,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
# What types need beside sizes. Those of None choose their kinds of layers themselves.
_OWN: dict[str, dict[str, Any]] = dict.fromkeys(_LATENT.split(), {"num_key_value_heads": 4}) | {
    **dict.fromkeys(
        ("axk1", "deepseek_v3", "longcat_flash", "sarvam_mla", "youtu"),
        {"num_key_value_heads": 4, "head_dim": 8},
    ),
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "gemma4_text": _SHARING,
    "gemma3n_text": _SHARING
    | {"intermediate_size": [128] * 6, "activation_sparsity_pattern": [0.0] * 6},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "reformer": {"is_decoder": True},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "bamba": {"attn_layer_indices": [1, 3], "layer_types": None},
    "jamba": {
        "layer_types": None,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "mamba2": {"layer_types": None, "num_heads": 8, "head_dim": 16, "n_groups": 1},
    "recurrent_gemma": {"layer_types": None, "lru_width": 64},
}


@dataclass(frozen=True)
class Finding:
    """The result of one type. ``reason``: why it is not served, or not exact. ``greedy``, ``sampled``:
    whether drafts changed no text (``WAYS``); None: nothing was drafted and accepted."""

    kind: str
    is_served: bool = False
    reason: str = ""
    exact: bool | None = None
    greedy: bool | None = None
    sampled: bool | None = None

    @property
    def is_equal(self) -> bool:
        return bool(self.greedy and self.sampled)


def tiny_config(kind: str) -> PreTrainedConfig:
    """Returns a type's configuration, of its text alone, with small sizes."""
    usual = AutoConfig.for_model(kind).get_text_config()
    known = {*vars(usual), *usual.attribute_map, *getattr(usual, "__dataclass_fields__", ())}
    wanted = {name: size for name, size in _SIZES.items() if name in known}
    for name in (*_LISTS, *_MORE_LISTS):
        value = getattr(usual, name, None)
        made = getattr(type(usual), usual.attribute_map.get(name, name), None)
        is_fixed = isinstance(made, property) and made.fset is None
        if isinstance(value, list) and value and not is_fixed:
            is_words = isinstance(value[0], str)
            wanted[name] = (list(dict.fromkeys(value)) * 4)[:4] if is_words else value[:4]
    wanted |= _OWN.get(kind, _OWN.get(usual.model_type, {}))
    wanted = {name: value for name, value in wanted.items() if value is not None}
    with suppress(Exception):
        return type(usual)(**wanted)
    wanted.pop("head_dim", None)
    return type(usual)(**wanted)


def tiny_model(kind: str) -> PreTrainedModel:
    """Returns a random model whose layers matter: transformers' own weights are nearly none."""
    config = tiny_config(kind)
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config).num_parameters()
    if size > _MOST_PARAMETERS:
        raise ValueError(f"sizes of its own make it one of {size:,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() < 2 or float(weight.std()) >= 0.1:
                continue
            if not weight.any():  # equal scores of a router are in no defined order
                weight.normal_()
            weight.mul_(1.2 * weight.shape[-1] ** -0.5 / weight.std())
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    evaluated: PreTrainedModel = model.eval()
    return evaluated


def look_at(kind: str) -> Finding:
    """Builds a type's model and an engine around it, and lets that write."""
    torch.set_num_threads(1)
    try:
        model = tiny_model(kind)
    except Exception as error:
        return Finding(kind, reason=f"no tiny model: {_said(error)}")
    return asked(kind, model)


def asked(kind: str, model: PreTrainedModel) -> Finding:
    """Builds an engine around a model, prepared or not, and lets that write."""
    config = EngineConfig(
        num_blocks=256,
        max_model_len=128,
        max_num_batched_tokens=64,
        drafters=("none", "ngram", "suffix"),
    )
    try:
        engine = build_engine_for(prepare_model(model, torch.device("cpu")), None, config)
    except UnsupportedModelError as error:
        return Finding(kind, reason=_said(error))
    except Exception as error:
        return Finding(kind, reason=f"breaks: {type(error).__name__}: {_said(error)}")
    exact, reason = engine.info.exact_verified, "; ".join(engine.info.exact_failed)
    try:
        equal = asyncio.run(_compare(engine))
    except Exception as error:
        return Finding(kind, True, f"breaks: {type(error).__name__}: {_said(error)}", exact)
    return Finding(kind, True, reason, exact, **equal)


def _said(error: Exception) -> str:
    return shorten(str(error), 220, placeholder=" ..")


async def _compare(engine: AsyncEngine) -> Mapping[str, bool | None]:
    await engine.start()
    try:
        equal: dict[str, bool | None] = {}
        for way, (drafter, temperature) in WAYS.items():
            plain, _ = await _write(engine, "none", temperature)
            # Twice: suffix drafts what it saw requests write.
            drafted = [await _write(engine, drafter, temperature) for _ in range(2)]
            num_accepted = sum(count for _, count in drafted)
            is_equal = all(texts == plain for texts, _ in drafted)
            equal[way] = is_equal if num_accepted or not is_equal else None
        return equal
    finally:
        await engine.stop()


async def _write(
    engine: AsyncEngine, drafter: str, temperature: float
) -> tuple[list[list[int]], int]:
    """Returns the texts of all prompts, and how many of their tokens were drafts."""
    num_accepted = 0
    speculative = SpeculativeParams(draft_strategy=drafter, adaptive_depth="fixed")

    async def read(index: int) -> list[int]:
        nonlocal num_accepted
        # Prompts that repeat themselves, of several lengths: look-up finds something to propose.
        part = [3 + (7 * index + 5 * place) % 60 for place in range(6 + 3 * index)]
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=index)
        name = f"{drafter}-{temperature}-{index}"
        request = GenerationRequest(name, tuple(part * 3), sampling, speculative)
        token_ids: list[int] = []
        async for event in engine.generate(request):
            token_ids += event.token_ids
            num_accepted += sum(event.drafted)
        return token_ids

    texts = await asyncio.gather(*map(read, range(NUM_PROMPTS)))
    return texts, num_accepted


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _look_in_child(kind: str) -> Finding:
    warnings.simplefilter("ignore")
    try:
        with _limited(_SECONDS):
            return look_at(kind)
    except Exception as error:
        return Finding(kind, reason=f"breaks: {_said(error)}")


def census(kinds: Iterable[str]) -> Iterator[Finding]:
    """Yields what each type came to; a process that a type breaks is replaced."""
    for group in _groups(list(kinds)):
        left = list(group)
        while left:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                try:
                    while left:
                        yield pool.submit(_look_in_child, left[0]).result()
                        del left[0]
                except BrokenProcessPool:
                    yield Finding(left.pop(0), reason="breaks: its process died")


def _groups(kinds: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(kinds), _TYPES_PER_PROCESS):
        yield kinds[first : first + _TYPES_PER_PROCESS]


def page(findings: Sequence[Finding]) -> str:
    """Returns docs/census.md."""
    served = [each for each in findings if each.is_served]
    exact = [each for each in served if each.exact]
    lines = [
        "# Which models are served",
        "",
        "<!-- Written by `python -m bench.census`; do not edit. -->",
        "",
        "Look up here whether a model's type can be served. `python -m bench.census` wrote this page: it",
        f"asked a tiny random model of each of the {len(findings)} types that transformers "
        f"{transformers.__version__} calls causal, on a CPU in",
        "float32. Checkpoints with parts for images or sounds are served by their text half: look for",
        "its type (for `gemma3`, `gemma3_text`).",
        "",
        f"Served: {len(served)}. Of these `exact`, by the checks at start: {len(exact)}. Equal texts "
        "with and without drafts, `ngram` greedy",
        "and `suffix` at temperature 0.9, several requests side by side: "
        f"{sum(each.is_equal for each in served)}. A dash: no draft was",
        "accepted, so nothing was shown.",
        "",
        "## Served",
        "",
        "| types | exact | greedy | sampled | |",
        "| --- | --- | --- | --- | --- |",
    ]
    alike: dict[str, list[str]] = {}
    for each in served:
        words = (_word(value) for value in (each.exact, each.greedy, each.sampled))
        row = f"{' | '.join(words)} | {_cell(each.reason)}"
        alike.setdefault(row, []).append(f"`{each.kind}`")
    lines += [f"| {', '.join(kinds)} | {row} |" for row, kinds in alike.items()]
    lines += ["", "## Not served", "", "| types | reason |", "| --- | --- |"]
    alike = {}
    for each in findings:
        if each not in served:
            reason, figure = _common(each.reason)
            alike.setdefault(_cell(reason), []).append(f"`{each.kind}`{figure}")
    lines += [f"| {', '.join(kinds)} | {reason} |" for reason, kinds in alike.items()]
    return "\n".join(lines) + "\n"


_OF_A_TYPE = re.compile(r"^\w*(?:Model|LM):? |^\w+ (?=has layers)")
_FIGURE = re.compile(r" by ([\d.]+) of their spread")


def _common(reason: str) -> tuple[str, str]:
    """A reason without what only one type has, and by how much of their spread its logits differ."""
    if reason.startswith("no tiny model"):
        return "transformers makes no tiny model of it, so it was not tried", ""
    figure = _FIGURE.search(reason)
    common = _FIGURE.sub(" by the given share of their spread", _OF_A_TYPE.sub("", reason))
    common = common.partition(";")[0]
    return common, f" ({figure[1]})" if figure else ""


def _word(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "-"}[value]


def _cell(text: str) -> str:
    """``text`` as a cell of a table; places of files in it are nobody's business."""
    return re.sub(r"(/[\w.+-]+){2,}/?", "..", text).replace("|", "\\|").replace("<", "&lt;")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="of transformers; default: all")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page of all is written")
    parser.add_argument("--lines", type=Path, help="a file of JSON that takes each finding at once")
    asked = parser.parse_args(arguments)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    unknown = sorted(set(asked.types) - set(TYPES))
    if unknown:
        parser.error(f"transformers knows no causal {', '.join(unknown)}")
    findings = []
    for finding in census(asked.types or TYPES):
        findings.append(finding)
        line = json.dumps(asdict(finding))
        print(line, flush=True)
        if asked.lines is not None:
            with asked.lines.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
    if not asked.types:
        asked.page.write_text(page(findings), encoding="utf-8")


if __name__ == "__main__":
    main()
