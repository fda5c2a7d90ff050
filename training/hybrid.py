"""Train a tiny hybrid of Qwen3.5's kind together with its MTP layer.

Three of its four layers keep a state (the gated delta rule), the fourth attends. The MTP layer reads the
normed state of token t and the embedding of token t + 1, and learns what the model itself says of token
t + 2; then, fed with its own states, of token t + 3, as it does when it drafts. The model learns from the
text and from the distribution of the bundled target, whose tokenizer it has.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from torch import nn
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNorm,
    Qwen3_5TextModel,
    Qwen3_5TextRotaryEmbedding,
)

from training.train import Learner, Reader, make_parser, soft_losses, train

SHAPE: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 448,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 2048,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
    },
}
MTP_WEIGHTS = (0.3, 0.15)  # of the losses of the first and the second draft token


class MtpLayer(Qwen3_5TextModel):
    """The layer with its norms, called as published checkpoints call them."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        own = copy.deepcopy(config)
        own.num_hidden_layers, own.layer_types = 1, ["full_attention"]
        super().__init__(own)
        size = config.hidden_size
        self.add_module("embed_tokens", nn.Identity())  # it reads vectors
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps=config.rms_norm_eps)
        nn.init.normal_(self.fc.weight, std=config.initializer_range)

    def draft(self, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return the states behind tokens, from those before them.  # [rows, width, size]"""
        both = self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(states)
        joined = self.fc(torch.cat(both, dim=-1))
        drafted: torch.Tensor = self(inputs_embeds=joined, use_cache=False).last_hidden_state
        return drafted


def build(config: Qwen3_5TextConfig) -> Any:
    """Create a freshly initialised model; its MTP layer is its part `mtp`."""
    model: Any = Qwen3_5ForCausalLM(config)
    model.mtp = MtpLayer(config)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if key.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
                p.mul_((2 * config.num_hidden_layers) ** -0.5)  # residual branches start small
            elif key.endswith("dt_bias"):  # and states last from some tokens to hundreds
                steps = torch.exp(torch.empty_like(p).uniform_(-6.9, -2.3))
                p.copy_(steps + torch.log(-torch.expm1(-steps)))
    nn.Module.to(model, torch.bfloat16)
    for part in (model.model, model.mtp):  # the cast also rounds the rotary frequencies
        part.rotary_emb = Qwen3_5TextRotaryEmbedding(config)
    return model


def load(folder: Path) -> Any:
    """Return a saved model with its MTP layer."""
    model = build(Qwen3_5TextConfig.from_pretrained(folder))
    load_model(model, folder / "model.safetensors", strict=False)  # the head is the embedding
    return model.eval()


@torch.no_grad()
def begin_from(teacher: Any, model: Any) -> None:
    """Give a model what fits of the teacher's embedding, which is its output head, too."""
    theirs = teacher.model.embed_tokens.weight.float()
    left, scale, _ = torch.linalg.svd(theirs, full_matrices=False)
    model.model.embed_tokens.weight.copy_((left * scale)[:, : model.config.hidden_size])
    for norm in (model.model.norm, model.mtp.norm):
        # A new model's states are mostly the last token's embedding, so that it is sure of that token
        # again: the norms, which multiply by one more than their weight, begin low.
        norm.weight.fill_(-0.8)


class HybridLearner(Learner):
    """The hybrid; its MTP layer learns beside it."""

    def attend(self, implementation: str) -> None:
        super().attend(implementation)
        self.model.mtp.set_attn_implementation(implementation)

    def further_losses(self, ids: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor | None:
        """Return what the drafts of each token cost.  # [rows * (width - 1)]"""
        states, vectors = self.states, self.model.model.embed_tokens(ids)
        told = log_probs.detach().view(*states.shape[:2], -1)
        total = torch.zeros(told.shape[:2])
        for depth, weight in enumerate(MTP_WEIGHTS, 1):
            states = self.model.mtp.draft(vectors[:, depth:-1], states[:, :-1])
            drafted = functional.log_softmax(self.model.lm_head(states).float(), dim=-1)
            losses = soft_losses(drafted, told[:, depth:])
            total = total + functional.pad(weight * losses, (depth, 0))
        return total.reshape(-1)


def main() -> None:
    """Train the hybrid for `--minutes`."""
    parser = make_parser(main.__doc__)
    parser.add_argument("--teacher", type=Path, default=Path("engine/bundled/target"))
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tok = AutoTokenizer.from_pretrained(args.tokenizer)
    config = Qwen3_5TextConfig(
        vocab_size=len(tok),
        tie_word_embeddings=True,
        bos_token_id=tok.bos_token_id,
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.pad_token_id,
        **SHAPE,
    )
    model = load(args.init / "hybrid") if args.init else build(config)
    teacher = LlamaForCausalLM.from_pretrained(args.teacher, dtype=torch.bfloat16)
    if not args.init:
        begin_from(teacher, model)
    train(args, tok, [HybridLearner("hybrid", model, args.lr)], Reader("target", teacher))


if __name__ == "__main__":
    main()
