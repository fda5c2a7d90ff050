"""Times a step by its number of rows, beside the same model as torch compiles it, and measures how long
the device is idle between two steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine.core import EngineCore
from engine.model.calibration.sequence import quantize_4_bits
from engine.model.decoder import cache_name
from engine.model.loader import prepare_model
from engine.model.quantization import replace_linears
from engine.model.runner import ModelRunner
from engine.request.events import TokenEvent
from engine.request.params import PLAIN, GenerationRequest, SamplingParams
from engine.weights.rounding.gptq import BITS, SPAN, GroupedWeight

_REPEATS = 20
_WARM_UPS = 3
_PROFILED = 16
_LIBRARY = "bench_library"
_LLAMA: dict[str, Any] = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": _LLAMA
    | {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    "smollm2": _LLAMA
    | {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
    | {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    | {"tie_word_embeddings": True},
    "toy": _LLAMA
    | {"vocab_size": 48, "hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.3}
    | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
}
"""Llama 3's 8 billion parameters, SmolLM2's 135 million, and a model that a CPU has time for."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Median seconds of a step of so many requests, a row each, after ``num_kv_tokens`` each, by the
    host's clock. ``num_bytes``: weights, keys and values that it has to read."""

    num_requests: int
    num_kv_tokens: int
    seconds: float
    num_bytes: int


class DeviceAccount(NamedTuple):
    """The device in one step of the whole engine: launches and copies, and the seconds it was busy, idle
    altogether, and idle between this step and the next."""

    num_launches: float
    busy_seconds: float
    idle_seconds: float
    between_seconds: float


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by the best of several large copies."""
    num_bytes = 1 << 30 if device.type == "cuda" else 1 << 26
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / min(_timed(lambda: target.copy_(source), device) for _ in range(5))


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a step of one row has to read."""
    weights = sum(each.nbytes for each in model.parameters())
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    is_tied = embedding.data_ptr() == head.data_ptr()
    return weights if is_tied else weights - embedding.nbytes  # one row of it is read


def random_model(shape: str, device: torch.device) -> PreTrainedModel:
    """In bf16. What a step takes does not depend on what weights are."""
    gc.collect()  # an engine before it
    torch.manual_seed(3)
    with device:
        model = LlamaForCausalLM._from_config(LlamaConfig(**SHAPES[shape]), dtype=torch.bfloat16)
    return prepare_model(model, device)


def round_model(model: PreTrainedModel) -> None:
    """Gives its layers 4 bits, to nearest, as ``--quantization int4`` does by texts. Raises
    UnsupportedModelError where it cannot be had."""

    def rounded(weight: torch.Tensor, _: torch.Tensor) -> GroupedWeight:
        scale = weight.float().abs().amax() / 7
        codes = (weight / scale + 8).round().to(torch.uint8)
        scales = scale.half().expand(len(weight), -(-weight.shape[1] // SPAN)).contiguous()
        return GroupedWeight(codes, BITS, 8, SPAN, scales)

    ids = torch.arange(1, 33, device=model.device)[None]
    replace_linears(model, quantize_4_bits(model, ids, rounded), "int4")


def own_step(
    runner: ModelRunner, num_requests: int, num_kv_tokens: int, num_weight_bytes: int
) -> StepTime:
    """Overwrites the store's blocks."""
    shape = num_requests, num_requests * num_kv_tokens, num_requests
    seconds = _median(lambda: runner.time_step(*shape))
    stored = runner.store.num_bytes // runner.store.num_slots * shape[1]
    return StepTime(num_requests, num_kv_tokens, seconds, num_weight_bytes + stored)


class StaticCache:
    """Keys and values of ``num_kv_tokens`` and one more, which each step writes anew. From then on
    ``model`` attends to all of them by the library."""

    def __init__(self, model: PreTrainedModel, num_requests: int, num_kv_tokens: int) -> None:
        AttentionInterface.register(_LIBRARY, _library_attention)
        model.set_attn_implementation(_LIBRARY)
        config: Any = model.config
        shape = num_requests, config.num_key_value_heads, num_kv_tokens + 1, config.head_dim
        self.planes = [
            (model.lm_head.weight.new_zeros(shape), model.lm_head.weight.new_zeros(shape))
            for _ in range(config.num_hidden_layers)
        ]
        self.position = torch.tensor([num_kv_tokens], device=model.device)
        self.name = cache_name(model)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.planes[layer]
        return keys.index_copy_(2, self.position, key), values.index_copy_(2, self.position, value)

    def get_seq_length(self, *_: Any) -> int:
        return int(self.planes[0][0].shape[2]) - 1


def _library_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Attends one row of each request to all keys: without a mask, so that keys are not repeated."""
    output = F.scaled_dot_product_attention(
        query, key, value, scale=module.scaling, enable_gqa=True
    )
    return output.transpose(1, 2), None


def plain_forward(model: PreTrainedModel, ids: torch.Tensor, cache: StaticCache) -> torch.Tensor:
    """Logits after ``ids``, one of each request: ``[num_requests, vocab_size]``."""
    output: Any = model(
        input_ids=ids,
        position_ids=cache.position.expand(len(ids), 1),
        use_cache=True,
        logits_to_keep=1,
        **{cache.name: cache},
    )
    logits: torch.Tensor = output.logits[:, -1]
    return logits


@torch.inference_mode()
def compiled_step(model: PreTrainedModel, num_requests: int, num_kv_tokens: int) -> StepTime:
    """A plain forward of transformers' own model: torch's compiler, its attention, a static cache and, on
    a GPU, one graph; on a CPU it is traced alone. ``model``: as it was made."""
    cache = StaticCache(model, num_requests, num_kv_tokens)
    ids = torch.ones(num_requests, 1, dtype=torch.long, device=model.device)

    def forward() -> torch.Tensor:
        return plain_forward(model, ids, cache).argmax(-1)

    torch.compiler.reset()
    on_gpu = model.device.type == "cuda"
    run: Callable[[], object] = torch.compile(
        forward, fullgraph=True, dynamic=False, backend="inductor" if on_gpu else "eager"
    )
    if on_gpu:
        run = _captured(run, model.device)
    num_bytes = weight_bytes(model) + sum(each.nbytes for pair in cache.planes for each in pair)
    return StepTime(
        num_requests, num_kv_tokens, _median(lambda: _timed(run, model.device)), num_bytes
    )


def _captured(forward: Callable[[], object], device: torch.device) -> Callable[[], object]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            forward()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return graph.replay


def device_account(core: EngineCore, num_requests: int) -> DeviceAccount | None:
    """While the engine decodes so many requests without drafts. None where there is no GPU, whose work
    alone is told apart from the host's."""
    device = core.runner.device
    _begin(core, num_requests)
    watched = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[watched]) as profiled:
        for _ in range(_PROFILED):
            core.step()
        _wait(device)
    while core.has_work:
        core.step()
    spans = [
        (event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiled.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
    return account_of(spans, _PROFILED) if spans else None


def _begin(core: EngineCore, num_requests: int) -> None:
    """Steps the engine until all requests have had a few tokens."""
    # As many more as steps that run ahead may take.
    lasting = SamplingParams(max_tokens=4 * _PROFILED, temperature=0.0, ignore_eos=True)
    for number in range(num_requests):
        prompt = tuple(1 + (number + place) % 40 for place in range(32))
        core.submit(core.prepare(GenerationRequest(f"step/{number}", prompt, lasting, PLAIN)))
    counts: dict[str, int] = {}
    while len(counts) < num_requests or min(counts.values()) < _PROFILED // 2:
        for event in core.step().events:
            if not isinstance(event, TokenEvent):
                raise RuntimeError(f"a request failed: {event}")
            counts[event.request_id] = counts.get(event.request_id, 0) + len(event.token_ids)


def account_of(spans: Sequence[tuple[float, float]], num_steps: int) -> DeviceAccount:
    """``spans``: when each launch began and ended, of ``num_steps`` in a row. The largest gaps are those
    between steps."""
    gaps, busy, until = [], 0.0, min(spans)[0]
    for start, end in sorted(spans):
        gaps.append(max(0.0, start - until))
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    between = sorted(gaps)[-max(1, num_steps - 1) :]
    return DeviceAccount(
        *(len(spans) / num_steps, busy / num_steps, sum(gaps) / num_steps, median(between))
    )


def _median(timed: Callable[[], float]) -> float:
    return median([timed() for _ in range(_WARM_UPS + _REPEATS)][_WARM_UPS:])


def _timed(run: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
