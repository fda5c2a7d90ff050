"""Models recommended for machines of 4 to 64 GB, with what each takes there, worked out from its shape.

Shapes are those of the models' configurations, bits those of llama.cpp's mixtures of types. No file was
opened for it: names are to be checked where there is a network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.hub.choice import size
from slipstream.tools.models.memory import CONTEXT, Needs

DRAFT_ROWS = 8
"""Rows of a step whose cost is given beside that of one: the newest token and seven drafts."""
_KV_BYTES = 2


@dataclass(frozen=True, slots=True)
class Bits:
    """Bits per weight of a mixture of types. ``large``: of values, of what goes back to the hidden
    width, and of experts' the same; ``head``: of the output, or of an embedding that is also one."""

    usual: float
    large: float
    experts: float
    experts_back: float
    embedding: float
    head: float


_Q4_K, _Q6_K, _Q8_0, _MXFP4 = 4.5, 6.5625, 8.5, 4.25
# Half of the layers have values and what goes back in Q6_K.
_HALF = (_Q4_K + _Q6_K) / 2
MIXTURES = {
    "Q4_K_M": Bits(_Q4_K, _HALF, _Q4_K, _HALF, _Q4_K, _Q6_K),
    "Q8_0": Bits(*[_Q8_0] * 6),
    "MXFP4": Bits(_Q8_0, _Q8_0, _MXFP4, _MXFP4, _Q8_0, _Q8_0),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """``inner``: width of the MLP, or of one expert. ``experts``: how many a layer has and how many of
    them a token reads; (0, 0): there are none."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    length: int
    is_tied: bool = False
    experts: tuple[int, int] = (0, 0)

    def weight_bytes(self, bits: Bits) -> float:
        """The bytes of all weights. Norms and routers, which are not quantized, are less than a
        thousandth."""
        return (
            self._beside(bits)
            + (0 if self.is_tied else self._embedding * bits.embedding / 8)
            + (self._mlp(bits) * max(self.experts[0], 1))
        )

    def bytes_read(self, bits: Bits, num_rows: int = 1) -> float:
        """The bytes of weights read in a step of so many rows, if rows chose experts at random: rows of
        one text share some, so this is an upper bound."""
        most, chosen = self.experts
        reached = 1.0 if not most else most * (1 - (1 - chosen / most) ** num_rows)
        return self._beside(bits) + self._mlp(bits) * reached

    @property
    def kv_bytes(self) -> int:
        """Per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _KV_BYTES

    @property
    def _embedding(self) -> int:
        return self.vocab * self.hidden

    def _beside(self, bits: Bits) -> float:
        """Bytes of attention, and of the output, which each step reads whole."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        usual = self.layers * self.hidden * (2 * query + kv) * bits.usual
        return (
            usual + self.layers * self.hidden * kv * bits.large + self._embedding * bits.head
        ) / 8

    def _mlp(self, bits: Bits) -> float:
        """Bytes of the MLPs of all layers, with experts of one in each."""
        into, back = (
            (bits.experts, bits.experts_back) if self.experts[0] else (bits.usual, bits.large)
        )
        return self.layers * self.hidden * self.inner * (2 * into + back) / 8


@dataclass(frozen=True, slots=True)
class Recommended:
    """A recommended model. ``memory``: of the machine, in GB. ``drafts``: published for it, besides
    drafters that need none."""

    memory: int
    name: str
    mixture: str
    shape: Shape
    drafts: tuple[str, ...] = ()

    @property
    def bits(self) -> Bits:
        return MIXTURES[self.mixture]

    @property
    def needs(self) -> Needs:
        return Needs(
            round(self.shape.weight_bytes(self.bits)), self.shape.kv_bytes, self.shape.length
        )


_QWEN_MOE = Shape(151_936, 2048, 48, 32, 4, 128, 768, 262_144, experts=(128, 8))
_SMALL = "unsloth/Qwen3-0.6B-GGUF:Q8_0"
_MOE_EAGLE = "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3"
RECOMMENDED = (
    Recommended(
        4,
        "unsloth/Qwen3-1.7B-GGUF:Q4_K_M",
        "Q4_K_M",
        Shape(151_936, 2048, 28, 16, 8, 128, 6144, 40_960, True),
    ),
    Recommended(
        8,
        "unsloth/Qwen3-4B-Instruct-2507-GGUF:Q4_K_M",
        "Q4_K_M",
        Shape(151_936, 2560, 36, 32, 8, 128, 9728, 262_144, True),
        (_SMALL,),
    ),
    Recommended(
        16,
        "unsloth/Qwen3-8B-GGUF:Q4_K_M",
        "Q4_K_M",
        Shape(151_936, 4096, 36, 32, 8, 128, 12_288, 40_960),
        ("RedHatAI/Qwen3-8B-speculator.eagle3", "z-lab/Qwen3-8B-DFlash-b16", _SMALL),
    ),
    Recommended(
        16,
        "ggml-org/gpt-oss-20b-GGUF",
        "MXFP4",
        Shape(201_088, 2880, 24, 64, 8, 64, 2880, 131_072, experts=(32, 4)),
        ("RedHatAI/gpt-oss-20b-speculator.eagle3",),
    ),
    Recommended(
        32,
        "unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF:Q4_K_M",
        "Q4_K_M",
        _QWEN_MOE,
        (_MOE_EAGLE, _SMALL),
    ),
    Recommended(
        64,
        "unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF:Q8_0",
        "Q8_0",
        _QWEN_MOE,
        (_MOE_EAGLE, _SMALL),
    ),
    Recommended(
        64,
        "unsloth/Qwen3-32B-GGUF:Q4_K_M",
        "Q4_K_M",
        Shape(151_936, 5120, 64, 64, 8, 128, 25_600, 40_960),
        ("RedHatAI/Qwen3-32B-speculator.eagle3", _SMALL),
    ),
)


def table(memory_speed: float) -> list[dict[str, Any]]:
    """Returns a row for each. ``memory_speed``: in GB/s; a step takes as long as reading what it reads
    at that speed, at most a text of ``CONTEXT`` tokens among it."""
    return [_row(each, memory_speed * 1e9) for each in RECOMMENDED]


def _row(model: Recommended, speed: float) -> dict[str, Any]:
    needs, shape = model.needs, model.shape
    text = needs.per_token * needs.num_tokens
    one, several = (shape.bytes_read(model.bits, rows) for rows in (1, DRAFT_ROWS))
    # What is left of nine tenths of the machine holds texts.
    left = model.memory * 0.9e9 - (needs.memory - text)
    return {
        "machine": f"{model.memory} GB",
        "name": model.name,
        "weights": size(needs.weights),
        f"memory_at_{CONTEXT}": size(needs.memory),
        "tokens_that_fit": min(int(left / needs.per_token), needs.length) // 1024 * 1024,
        "read_per_token": size(one),
        "ms_per_token": round(1000 * one / speed, 1),
        f"ms_at_{CONTEXT}": round(1000 * (one + text) / speed, 1),
        f"cost_of_{DRAFT_ROWS}_rows": round(several / one, 2),
        "drafts": ", ".join(model.drafts),
    }
