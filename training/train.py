"""Train the target and the draft model side by side on the same batches.

The budget is counted in active minutes: the time of each step, capped, so that a paused
process does not lose training.  The learning rate is constant after a warm-up and decays
linearly to zero over the last part of the budget.  Writing a number of minutes into
`<out>/decay` starts the decay at once and sets its length, 0: ends the training; writing another
number later plans the rest of it anew, from the rate reached by then.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from training.samples import (
    Mix,
    Sample,
    code_sample,
    draw,
    edit_sample,
    group,
    is_plain,
    load_units,
    pad,
)
from training.tokenizer import save_tokenizer

SHAPES: dict[str, dict[str, Any]] = {
    "target": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "draft": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
EAGER_ATTENTION = {"target": 700, "draft": 1500, "hybrid": 700}  # the widest batch it is faster for
MICRO_TOKENS = 2048
MICRO_PER_STEP = 2
WARMUP_STEPS = 60
DECAY_SHARE = 0.22
PLAIN_SHARE = 0.5  # of the code during the decay: short stand-alone pieces that repeat little


def build(name: str, tok: Any) -> LlamaForCausalLM:
    """Create a freshly initialised model of one of the two shapes."""
    config = LlamaConfig(
        vocab_size=len(tok),
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tok.bos_token_id,
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.pad_token_id,
        rms_norm_eps=1e-5,
        initializer_range=0.02,
        **SHAPES[name],
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # residual branches start small
        for key, p in model.named_parameters():
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                p.mul_((2 * config.num_hidden_layers) ** -0.5)
    torch.nn.Module.to(model, torch.bfloat16)
    # The cast above also rounds the rotary frequencies, which loading a saved model does not.
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model


class Reader:
    """A bf16 model that reads batches."""

    def __init__(self, name: str, model: Any) -> None:
        self.name, self.model = name, model
        self.states = torch.empty(0)
        """The last batch's states, behind the last norm.  # [rows, width - 1, size]"""

    def log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of every next token.  # [rows * (width - 1), vocab]"""
        # On CPUs the fused attention's backward pass is the slower one until rows get long.
        self.attend("sdpa" if ids.shape[1] > EAGER_ATTENTION[self.name] else "eager")
        self.states = self.model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        logits = self.model.lm_head(self.states.flatten(0, 1)).float()
        return functional.log_softmax(logits, dim=-1)

    def attend(self, implementation: str) -> None:
        """Choose how attention is computed."""
        self.model.set_attn_implementation(implementation)


class Learner(Reader):
    """With fp32 master weights: Muon for matrices, AdamW for the rest."""

    def __init__(self, name: str, model: Any, lr: float) -> None:
        super().__init__(name, model)
        self.lr = lr
        self.live = dict(self.model.named_parameters())
        self.master = {k: torch.nn.Parameter(p.detach().float()) for k, p in self.live.items()}
        matrices = [p for k, p in self.master.items() if p.ndim == 2 and "embed" not in k]
        others = [p for k, p in self.master.items() if p.ndim != 2 or "embed" in k]
        self.opts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def further_losses(self, ids: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor | None:
        """Return what each token costs besides, for what reads this model's states."""
        del ids, log_probs
        return None

    def step(self, scale: float) -> None:
        """Apply the gathered gradients with the learning rate scaled."""
        for key, p in self.live.items():
            assert p.grad is not None
            self.master[key].grad = p.grad.float()
            p.grad = None
        torch.nn.utils.clip_grad_norm_(list(self.master.values()), 1.0)
        for opt in self.opts:
            for param_group in opt.param_groups:
                param_group["lr"] = self.lr * scale
            opt.step()
        with torch.no_grad():
            for key, p in self.live.items():
                p.copy_(self.master[key])

    def state(self) -> dict[str, Any]:
        """Return everything needed to go on later."""
        return {
            "master": {k: p.detach() for k, p in self.master.items()},
            "opts": [o.state_dict() for o in self.opts],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        with torch.no_grad():
            for key, p in self.master.items():
                p.copy_(state["master"][key])
                self.live[key].copy_(p)
        for opt, saved in zip(self.opts, state["opts"], strict=True):
            opt.load_state_dict(saved)


def token_losses(log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of every token that follows another.  # [rows * (width - 1)]"""
    return -log_probs.gather(1, ids[:, 1:].reshape(-1, 1)).squeeze(1)


def soft_losses(log_probs: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy with another model's log-probabilities at every position.

    Up to the teacher's own entropy, which has no gradient, this is their KL divergence.
    """
    return -(teacher.exp() * log_probs).sum(-1)


@torch.no_grad()
def held_out_loss(learner: Learner, samples: list[Sample]) -> float:
    """Return the mean loss per token that counts fully (all code, only answers of edits)."""
    total, count = 0.0, 0
    for part in group(samples, random.Random(0), MICRO_TOKENS, keep_rest=True):
        ids, weights = pad(part)
        chosen = token_losses(learner.log_probs(ids), ids)[weights[:, 1:].reshape(-1) >= 1.0]
        total, count = total + chosen.sum().item(), count + chosen.numel()
    return total / count


@dataclass(frozen=True)
class Decay:
    """A linear decay of the learning-rate factor to zero, in active seconds."""

    start: float
    length: float
    factor: float = 1.0
    asked: str = ""  # what the `decay` file held that asked for it

    @classmethod
    def planned(cls, budget: float, saved: dict[str, Any] | None = None) -> Decay:
        """Return the last part of the budget, or what was saved if the `decay` file asked for that."""
        if saved is not None and saved["asked"]:
            return cls(**saved)
        return cls(budget * (1 - DECAY_SHARE), budget * DECAY_SHARE)

    def at(self, active: float) -> float:
        """Return the factor at a time, full before the start."""
        left = self.end - active
        return self.factor * min(1.0, left / self.length) if left > 0 else 0.0

    @property
    def end(self) -> float:
        """The active second at which training is done."""
        return self.start + self.length

    def replan(self, path: Path, active: float) -> Decay:
        """Return the decay that the file asks for, from the factor reached so far, else this."""
        asked = path.read_text().strip() if path.exists() else ""
        if not asked or asked == self.asked:
            return self
        return Decay(active, float(asked) * 60, self.at(active), asked)


def save(out: Path, tok: Any, learners: list[Learner], state: dict[str, Any]) -> None:
    """Write both models as loadable folders, then the resume state, each by rename."""
    for learner in learners:
        folder = out / learner.name
        learner.model.save_pretrained(folder)
        save_tokenizer(tok, folder)
    torch.save(state | {lr.name: lr.state() for lr in learners}, out / "state.tmp")
    (out / "state.tmp").replace(out / "state.pt")


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Add one line to the log."""
    with open(path, "a") as handle:
        handle.write(json.dumps(row) + "\n")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of what every training takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="active, in all runs together")
    parser.add_argument("--save-every", type=float, default=5.0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--init",
        type=Path,
        help="start from the weights in INIT/target and INIT/draft; the optimiser starts afresh",
    )
    parser.add_argument(
        "--distill",
        type=float,
        default=0.0,
        help="how much of the loss is imitating the model before it instead of the text, 0 to 1",
    )
    return parser


def train(
    args: argparse.Namespace, tok: Any, learners: list[Learner], fixed: Reader | None = None
) -> None:
    """Run training until the active-time budget is used up; `fixed` teaches the first learner."""
    units = load_units(args.corpus / "train.jsonl")
    plain = [text for text in units if is_plain(text)]
    rng = random.Random(7)
    held = load_units(args.corpus / "heldout.jsonl")
    rng.shuffle(held)
    held_code = [s for s in (code_sample(tok, t) for t in held[:60]) if len(s.ids) < 1024]
    held_mix = Mix(1.0, 1800, 0.0, 0.0)
    held_edits = [edit_sample(tok, rng, held[60:], held_mix) for _ in range(40)]

    args.out.mkdir(parents=True, exist_ok=True)
    budget, active, step, tokens = args.minutes * 60, 0.0, 0, 0
    decay = Decay.planned(budget)
    if (args.out / "state.pt").exists():
        state = torch.load(args.out / "state.pt", weights_only=True)
        active, step, tokens = (state[k] for k in ("active", "step", "tokens"))
        decay = Decay.planned(budget, state["decay"])
        for learner in learners:
            learner.restore(state[learner.name])
    for learner in learners:
        count = sum(p.numel() for p in learner.model.parameters())
        print(f"{learner.name}: {count / 1e6:.2f} M parameters", flush=True)

    log_path = args.out / "log.jsonl"
    queue: list[list[Sample]] = []
    times: list[float] = []
    sums: dict[str, list[float]] = {}
    last_save = active
    while True:
        began = time.monotonic()
        progress = active / budget
        decay = decay.replan(args.out / "decay", active)
        if len(queue) < MICRO_PER_STEP:
            # Seeding by step keeps a resumed run from seeing the same documents again.
            rng = random.Random(args.seed * 1_000_003 + step)
            decaying = active >= decay.start
            mix = Mix.at(1.0 if args.init else progress, decaying)
            share = PLAIN_SHARE if decaying else 0.0
            pool = [
                draw(tok, rng, plain if rng.random() < share else units, units, mix, 2048)
                for _ in range(256)
            ]
            queue += group(pool, rng, MICRO_TOKENS)
        micro = [queue.pop() for _ in range(MICRO_PER_STEP)]
        total = sum(w for part in micro for s in part for w in s.weights)
        for part in micro:
            ids, weights = pad(part)
            wanted = weights[:, 1:].reshape(-1)
            is_edit = torch.tensor([s.is_edit for s in part])[:, None].expand_as(ids[:, 1:])
            kinds = {"code": ~is_edit.reshape(-1), "edit": is_edit.reshape(-1)}
            with torch.no_grad():
                teacher = None if fixed is None else fixed.log_probs(ids)
            for learner in learners:
                log_probs = learner.log_probs(ids)
                each = token_losses(log_probs, ids)
                learnt = each
                if args.distill and teacher is not None:
                    soft = soft_losses(log_probs, teacher)
                    learnt = (1 - args.distill) * each + args.distill * soft
                if (further := learner.further_losses(ids, log_probs)) is not None:
                    learnt = learnt + further
                torch.autograd.backward((learnt * wanted).sum() / total)
                teacher = log_probs.detach()
                for kind, rows in kinds.items():
                    chosen = each.detach()[(wanted >= 1.0) & rows]
                    if chosen.numel():
                        sums.setdefault(f"{learner.name}_{kind}", []).append(chosen.mean().item())
            tokens += sum(len(s.ids) for s in part)
        factor = min(1.0, (step + 1) / WARMUP_STEPS) * decay.at(active)
        for learner in learners:
            learner.step(factor)
        step += 1
        took = time.monotonic() - began
        times = [*times[-50:], took]
        active += min(took, 3 * statistics.median(times))
        finished = active >= decay.end
        if step % 20 == 0:
            row: dict[str, Any] = {
                "step": step,
                "tokens": tokens,
                "active": round(active),
                "lr": round(factor, 3),
                "tok_s": round(tokens / active),
            }
            row |= {k: round(statistics.mean(v), 3) for k, v in sums.items()}
            append_line(log_path, row)
            sums = {}
        if finished or active - last_save > args.save_every * 60:
            last_save = active
            state = {"active": active, "step": step, "tokens": tokens, "decay": asdict(decay)}
            save(args.out, tok, learners, state)
            row = {"step": step, "tokens": tokens, "active": round(active)}
            for learner in learners:
                row[f"held_{learner.name}_code"] = round(held_out_loss(learner, held_code), 4)
                row[f"held_{learner.name}_edit"] = round(held_out_loss(learner, held_edits), 4)
            append_line(log_path, row)
        if finished:
            return


def main() -> None:
    """Train the bundled target and draft."""
    args = make_parser(main.__doc__).parse_args()
    torch.manual_seed(args.seed)
    tok = AutoTokenizer.from_pretrained(args.tokenizer)
    learners = []
    for name, lr in (("target", args.lr), ("draft", args.lr * 1.3)):
        model = build(name, tok)
        if args.init:
            model = LlamaForCausalLM.from_pretrained(args.init / name, dtype=torch.bfloat16)
        learners.append(Learner(name, model, lr))
    train(args, tok, learners)


if __name__ == "__main__":
    main()
