"""llama.cpp: bf16, Q8_0 and Q4_0 behind its own server, and its own batched-bench.

Built from the sources that PyPI's ``llama-cpp-python`` carries, for this machine's processor; the
build takes most of an hour on two cores. Checkpoints of Llama's shape become GGUF by ``gguf``, in its
environment: that is this file run as a module.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.peers.place import Arm, Peer, PeerUnavailableError, Place, WorkerPlan, call, once

NAME = "llama.cpp"
TYPES = ("bf16", "q8_0", "q4_0")
_DRAFT_TYPE = "q8_0"
_TARGETS = ("llama-server", "llama-batched-bench")
_CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
# Where the processor has AMX, weights in 8 and 4 bits end in a segmentation fault
# (https://github.com/ggml-org/llama.cpp/issues/20824): it computes as on processors that have none.
_CMAKE_X86 = ("-DCMAKE_C_FLAGS=-mno-amx-int8", "-DCMAKE_CXX_FLAGS=-mno-amx-int8")
_SPECULATIONS = {
    "ngram": ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4"),
    "draft": ("--spec-draft-n-max", "6", "--spec-draft-p-min", "0.5"),
}


class LlamaCpp(Peer):
    name = NAME
    what = "llama.cpp's server, sources of llama-cpp-python"
    requirements = ("gguf", "safetensors", "numpy", "cmake", "ninja")

    def prepare(self, place: Place) -> None:
        if shutil.which("c++") is None:
            raise PeerUnavailableError("there is no C++ compiler to build it with")
        once(place.folder(NAME) / "source", partial(_fetch, place))
        self._build(place)
        wanted = [(place.target, kind) for kind in TYPES]
        if place.draft is not None:
            wanted.append((place.draft, _DRAFT_TYPE))
        for source, kind in wanted:
            once(
                place.export(NAME, source, kind),
                partial(_convert_in, str(place.python(NAME)), source, kind),
            )

    def plans(self, place: Place) -> list[WorkerPlan]:
        plans = [self._plan(place, kind, "plain") for kind in TYPES]
        modes = [mode for mode in _SPECULATIONS if mode != "draft" or place.draft is not None]
        return [*plans, *(self._plan(place, "q8_0", mode) for mode in modes)]

    def own_bench(self, place: Place, concurrency: Sequence[int], num_new: int) -> str | None:
        """batched-bench, on tokens of its own choice: a table for each type."""
        programs = place.folder(NAME) / "build" / "bin"
        num_prompt = place.max_tokens - num_new
        parts = []
        for kind in TYPES:
            command = [
                str(programs / "llama-batched-bench"),
                *("-m", str(place.export(NAME, place.target, kind) / "model.gguf")),
                *("-t", str(place.num_threads), "-c", str(max(concurrency) * place.max_tokens)),
                *("-npp", str(min(num_prompt, 256)), "-ntg", str(num_new)),
                *("-npl", ",".join(map(str, concurrency))),
            ]
            lines = [line for line in call(command).splitlines() if line.startswith("|")]
            parts.append("\n".join([f"{kind}:", "", *lines]))
        return "\n\n".join(parts)

    def _plan(self, place: Place, kind: str, mode: str) -> WorkerPlan:
        program = place.folder(NAME) / "build" / "bin" / "llama-server"
        title = f"{NAME} {kind} {mode}"
        command = [
            str(program),
            *("--model", str(place.export(NAME, place.target, kind) / "model.gguf")),
            *("--host", "127.0.0.1", "--port", "{port}"),
            *("--threads", str(place.num_threads), "--threads-http", "1"),
            *("--parallel", str(place.max_running)),
            *("--ctx-size", str(place.max_running * place.max_tokens)),
            *_SPECULATIONS.get(mode, ()),
        ]
        if mode == "draft" and place.draft is not None:
            draft = place.export(NAME, place.draft, _DRAFT_TYPE) / "model.gguf"
            command += ["--model-draft", str(draft)]
        return WorkerPlan(
            name=title,
            python=Path(sys.executable),
            module="bench.peers.http_worker",
            load={"command": command, "ready": "/health", "dialect": "llama"},
            arms=(Arm(f"{title} (HTTP)", speculates=mode != "plain", over_http=True),),
        )

    def _build(self, place: Place) -> None:
        folder = place.folder(NAME)
        build = folder / "build"
        if all((build / "bin" / target).is_file() for target in _TARGETS):
            return
        (source,) = (folder / "source").glob("*/vendor/llama.cpp")
        bin_ = place.python(NAME).parent
        cmake = [str(bin_ / "cmake"), f"-DCMAKE_MAKE_PROGRAM={bin_ / 'ninja'}"]
        flags = [*_CMAKE, *(_CMAKE_X86 if platform.machine() == "x86_64" else ())]
        call([*cmake, "-S", str(source), "-B", str(build), "-G", "Ninja", *flags])
        jobs = str(place.num_threads)
        call([str(bin_ / "ninja"), "-C", str(build), "-j", jobs, *_TARGETS])


def _fetch(place: Place, folder: Path) -> None:
    pip = [str(place.python(NAME)), "-m", "pip", "download", "--quiet", "--no-deps"]
    call([*pip, "--no-binary", "llama-cpp-python", "-d", str(folder), "llama-cpp-python"])
    (archive,) = folder.glob("*.tar.gz")
    call(["tar", "-xzf", str(archive), "-C", str(folder)])
    archive.unlink()


def _convert_in(python: str, source: Path, kind: str, folder: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    call(
        [python, "-m", "bench.peers.llama_cpp", str(source), kind, str(folder / "model.gguf")],
        environ={**os.environ, "PYTHONPATH": root},
    )


def convert(source: Path, kind: str, target: Path) -> None:
    """A Llama-shaped checkpoint of one safetensors file, with a byte-level BPE, as GGUF.

    Matrices become ``kind``; norms stay fp32; under q4_0 the embedding, which is the head as well where
    they are tied, is q8_0, as llama.cpp's own tool keeps it above 4 bits.
    """
    gguf = import_module("gguf")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(target), "llama")
    _write_shape(writer, config)
    _write_tokenizer(writer, gguf, source, config)
    for name, weight in _weights(source):
        if name.endswith("q_proj.weight"):
            weight = _interleaved(weight, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            weight = _interleaved(weight, config["num_key_value_heads"])
        wanted = "q8_0" if kind == "q4_0" and "embed_tokens" in name else kind
        if weight.ndim == 1:
            wanted = "f32"
        type_ = gguf.GGMLQuantizationType[wanted.upper()]
        data = gguf.quants.quantize(weight, type_)
        writer.add_tensor(_tensor_name(name), data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: Any, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write_tokenizer(writer: Any, gguf: Any, source: Path, config: dict[str, Any]) -> None:
    data = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {token_id: token for token, token_id in data["model"]["vocab"].items()}
    special = {each["id"]: each["content"] for each in data["added_tokens"]}
    count = config["vocab_size"]
    types = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(
        [special.get(at) or ids.get(at) or f"<unused {at}>" for at in range(count)]
    )
    writer.add_token_types(
        [
            types.CONTROL if at in special else types.NORMAL if at in ids else types.UNUSED
            for at in range(count)
        ]
    )
    merges = data["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _weights(source: Path) -> Any:
    """Names and fp32 arrays."""
    numpy = import_module("numpy")
    raw = (source / "model.safetensors").read_bytes()
    for name, tensor in import_module("safetensors").deserialize(raw):
        if tensor["dtype"] == "BF16":
            half = numpy.frombuffer(tensor["data"], dtype=numpy.uint16)
            flat = (half.astype(numpy.uint32) << 16).view(numpy.float32)
        else:
            kinds = {"F32": numpy.float32, "F16": numpy.float16}
            flat = numpy.frombuffer(tensor["data"], kinds[tensor["dtype"]]).astype(numpy.float32)
        yield name, flat.reshape(tensor["shape"])


def _interleaved(weight: Any, num_heads: int) -> Any:
    """llama.cpp rotates neighbours, transformers halves: rows of a head change places."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return import_module("numpy").ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _tensor_name(name: str) -> str:
    """GGUF's name for transformers'. Raises KeyError for what a Llama has not."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    at, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{int(at)}.{_IN_LAYER[part.removesuffix('.weight')]}.weight"


if __name__ == "__main__":
    convert(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
