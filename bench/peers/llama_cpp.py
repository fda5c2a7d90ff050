"""llama.cpp: a GGUF file as it is, or a checkpoint in bf16, Q8_0 and Q4_0, behind its own server; and
its own batched-bench.

Built from the sources that PyPI's ``llama-cpp-python`` carries, for this machine's processor; the
build takes ten minutes to an hour on two cores. Checkpoints of Llama's shape become GGUF by
``bench.peers.gguf_writer``, in its environment.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.peers.place import (
    ROOT,
    Arm,
    Peer,
    PeerUnavailableError,
    Place,
    WorkerPlan,
    call,
    make_environment,
    once,
)

NAME = "llama.cpp"
TYPES = ("bf16", "q8_0", "q4_0")
K_TYPES = ("q3_k_m", "q4_k_s", "q4_k_m", "q5_k_m", "q6_k", "iq4_nl")
"""Mixtures of blocks that only its own tool quantises."""
_FILE = "gguf"
_DRAFT_TYPE = "q8_0"
_TARGETS = ("llama-server", "llama-batched-bench", "llama-quantize")
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
# Its simple look-up as it comes and with drafts that a CPU verifies sooner, its llama-lookup, and
# what its --spec-default means.
_SPECULATIONS = {
    "ngram": ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4"),
    "ngram 8": (
        *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4"),
        *("--spec-ngram-simple-size-m", "8"),
    ),
    "lookup": ("--spec-type", "ngram-cache"),
    "ngram-mod": ("--spec-default",),
    "draft": (
        *("--spec-type", "draft-simple"),
        *("--spec-draft-n-max", "6", "--spec-draft-p-min", "0.5"),
    ),
}


class LlamaCpp(Peer):
    name = NAME
    what = "llama.cpp's server, sources of llama-cpp-python"
    requirements = ("gguf", "safetensors", "numpy", "cmake", "ninja")

    def prepare(self, place: Place) -> None:
        _build(place)
        wanted = [(place.target, kind) for kind in (TYPES if place.gguf is None else ())]
        if place.draft is not None:
            wanted.append((place.draft, _DRAFT_TYPE))
        for source, kind in wanted:
            once(place.export(NAME, source, kind), partial(_convert_in, place, source, kind))

    def plans(self, place: Place) -> list[WorkerPlan]:
        files = _files(place)
        plans = [self._plan(place, kind, "plain") for kind in files]
        modes = [mode for mode in _SPECULATIONS if mode != "draft" or place.draft is not None]
        drafting = _FILE if _FILE in files else "q8_0"
        return [*plans, *(self._plan(place, drafting, mode) for mode in modes)]

    def own_bench(self, place: Place, concurrency: Sequence[int], num_new: int) -> str | None:
        """batched-bench, on tokens of its own choice: a table for each type."""
        num_prompt = place.max_tokens - num_new
        parts = []
        for kind, file in _files(place).items():
            command = [
                str(program(place, "llama-batched-bench")),
                *("-m", str(file)),
                *("-t", str(place.num_threads), "-c", str(max(concurrency) * place.max_tokens)),
                *("-npp", str(min(num_prompt, 256)), "-ntg", str(num_new)),
                *("-npl", ",".join(map(str, concurrency))),
            ]
            lines = [line for line in call(command).splitlines() if line.startswith("|")]
            parts.append("\n".join([f"{kind}:", "", *lines]))
        return "\n\n".join(parts)

    def _plan(self, place: Place, kind: str, mode: str) -> WorkerPlan:
        title = f"{NAME} {kind} {mode}"
        command = [*server_command(place, _files(place)[kind]), *_SPECULATIONS.get(mode, ())]
        if mode == "draft" and place.draft is not None:
            draft = place.export(NAME, place.draft, _DRAFT_TYPE) / "model.gguf"
            command += ["--model-draft", str(draft)]
        return WorkerPlan(
            name=title,
            python=Path(sys.executable),
            module="bench.peers.http_worker",
            load={
                **{"command": command, "ready": "/health", "dialect": "llama"},
                "facts": {"llama-cpp-python": _version(place)},
            },
            arms=(Arm(f"{title} (HTTP)", speculates=mode != "plain", over_http=True),),
        )


def program(place: Place, name: str) -> Path:
    return place.folder(NAME) / "build" / "bin" / name


def server_command(place: Place, file: Path) -> list[str]:
    """Serves a GGUF file on ``{port}``, with room for ``max_running`` requests at once."""
    return [
        str(program(place, "llama-server")),
        *("--model", str(file)),
        *("--host", "127.0.0.1", "--port", "{port}"),
        *("--threads", str(place.num_threads), "--threads-http", "1"),
        *("--parallel", str(place.max_running)),
        *("--ctx-size", str(place.max_running * place.max_tokens)),
        # Else it copies the keys and values of each request that has ended: no prompt is cached here.
        *("--cache-ram", "0"),
    ]


def quantize(place: Place, kind: str, folder: Path, name: str) -> None:
    """Writes ``name`` into ``folder``: the target as a GGUF file in one of ``K_TYPES``. Builds llama.cpp
    where that was not done. Raises PeerUnavailableError."""
    make_environment(LlamaCpp(), place)
    _build(place)
    whole = folder / "whole.gguf"
    _write_in(place, place.target, "f32", whole)
    tool = str(program(place, "llama-quantize"))
    call([tool, str(whole), str(folder / name), kind.upper(), str(place.num_threads)])
    whole.unlink()


def _files(place: Place) -> dict[str, Path]:
    """Returns its server's model files, by arms' names."""
    if place.gguf is not None:
        return {_FILE: place.gguf}
    return {kind: place.export(NAME, place.target, kind) / "model.gguf" for kind in TYPES}


def _build(place: Place) -> None:
    if all(program(place, target).is_file() for target in _TARGETS):
        return
    if shutil.which("c++") is None:
        raise PeerUnavailableError("there is no C++ compiler to build it with")
    folder = place.folder(NAME)
    once(folder / "source", partial(_fetch, place))
    (source,) = (folder / "source").glob("*/vendor/llama.cpp")
    build = str(folder / "build")
    bin_ = place.python(NAME).parent
    cmake = [str(bin_ / "cmake"), f"-DCMAKE_MAKE_PROGRAM={bin_ / 'ninja'}"]
    flags = [*_CMAKE, *(_CMAKE_X86 if platform.machine() == "x86_64" else ())]
    call([*cmake, "-S", str(source), "-B", build, "-G", "Ninja", *flags])
    call([str(bin_ / "ninja"), "-C", build, "-j", str(place.num_threads), *_TARGETS])


def _version(place: Place) -> str:
    """Returns the built sources' version."""
    return "".join(
        path.name.partition("-")[2] for path in (place.folder(NAME) / "source").glob("llama_cpp*-*")
    )


def _fetch(place: Place, folder: Path) -> None:
    pip = [str(place.python(NAME)), "-m", "pip", "download", "--quiet", "--no-deps"]
    call([*pip, "--no-binary", "llama-cpp-python", "-d", str(folder), "llama-cpp-python"])
    (archive,) = folder.glob("*.tar.gz")
    call(["tar", "-xzf", str(archive), "-C", str(folder)])
    archive.unlink()


def _convert_in(place: Place, source: Path, kind: str, folder: Path) -> None:
    _write_in(place, source, kind, folder / "model.gguf")


def _write_in(place: Place, source: Path, kind: str, file: Path) -> None:
    python = str(place.python(NAME))
    call(
        [python, "-m", "bench.peers.gguf_writer", str(source), kind, str(file)],
        environ={**os.environ, "PYTHONPATH": str(ROOT)},
    )
