"""Train the heads of the medusa or eagle drafter for a model, from texts and its own outputs.

The target is frozen and its own distributions are what is learnt. The budget is counted in minutes
of work: a run that is stopped and started again with the same --out goes on. The learning rate
falls to zero over the budget. The heads in --out can be served at any time, each save replaces them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from engine.drafting import eagle as eagle_head
from engine.drafting import medusa as medusa_heads
from engine.drafting.heads import TargetFacts, target_facts, write_heads
from engine.model.loader import load_model, load_tokenizer, max_position
from training.head_data import Texts, batches, load_texts, write_samples
from training.head_losses import Batch, EagleLearner, Learner, MedusaLearner, Target

WARMUP_STEPS = 20
HELD_OUT_SEQUENCES = 48
TOKENS_PER_STEP = 2048


def make_learner(kind: str, target: Target, args: argparse.Namespace) -> Learner:
    """Fresh heads of one kind for the target; an eagle layer is as large as one of its layers."""
    hidden_size = int(target.head.in_features)
    if kind == eagle_head.KIND:
        return EagleLearner(hidden_size, eagle_sizes(target.model.config.get_text_config()))
    return MedusaLearner(hidden_size, args.num_heads, args.num_layers)


def eagle_sizes(config: Any) -> list[int]:
    """``SIZES`` of a Llama layer that fits the target, from its own where they are a Llama's."""
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    inner = int(getattr(config, "intermediate_size", None) or 3 * config.hidden_size)
    return [inner, heads, kv_heads, head_dim, max_position(config)]


class Trainer:
    """Heads, their optimiser, and what is needed to go on later."""

    def __init__(
        self, target: Target, learner: Learner, facts: TargetFacts, out: Path, args: Any
    ) -> None:
        self.target, self.learner, self.facts, self.out, self.args = (
            target,
            learner,
            facts,
            out,
            args,
        )
        learner.module.to(target.model.device)
        self.optimizer = torch.optim.AdamW(
            learner.module.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.step = 0
        self.seconds = 0.0
        state = out / "state.pt"
        if state.exists():
            self._restore(torch.load(state, weights_only=True, map_location="cpu"))

    def _restore(self, saved: dict[str, Any]) -> None:
        for name, wanted in (("kind", self.args.kind), ("target", self.facts.fingerprint)):
            if saved[name] != wanted:
                raise ValueError(
                    f"--out {self.out} holds a run with {name} {saved[name]}, not {wanted}"
                )
        self.learner.module.load_state_dict(saved["heads"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.seconds = saved["step"], saved["seconds"]

    def train(self, groups: Iterator[list[list[int]]], held: list[Batch]) -> list[float]:
        """Until the budget is used up; returns the held-out accuracy by depth."""
        budget, last_save = self.args.minutes * 60, self.seconds
        while self.seconds < budget and self.step < self.args.max_steps:
            began = time.monotonic()
            self._learn(next(groups), budget)
            self.seconds += time.monotonic() - began
            if self.seconds - last_save > self.args.save_every * 60:
                last_save = self.seconds
                self.save(self.accuracy(held))
        accuracy = self.accuracy(held)
        self.save(accuracy)
        return accuracy

    def _learn(self, group: list[list[int]], budget: float) -> None:
        rng = random.Random(self.step)
        with self._mixed_precision():
            batch = self.target.read(group)
            result = self.learner.run(self.target, batch, rng, self.args.positions)
        result.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.learner.module.parameters(), 1.0)
        scale = min(1.0, (self.step + 1) / WARMUP_STEPS, max(0.0, 1 - self.seconds / budget))
        for part in self.optimizer.param_groups:
            part["lr"] = self.args.lr * scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.step % 50 == 0:
            hits = [round(hit / result.num_rows, 3) for hit in result.num_hits]
            print(f"step {self.step}: loss {result.loss.item():.3f}, right {hits}", flush=True)

    def _mixed_precision(self) -> torch.autocast:
        """The heads' own numbers stay float32; products are in bf16 where the target's are."""
        model = self.target.model
        return torch.autocast(
            model.device.type, torch.bfloat16, enabled=model.dtype == torch.bfloat16
        )

    @torch.no_grad()
    def accuracy(self, held: list[Batch]) -> list[float]:
        """Per depth: how often the heads' likeliest token is the target's, on held-out texts."""
        rng = random.Random(0)
        with self._mixed_precision():
            results = [self.learner.run(self.target, batch, rng, 1 << 20) for batch in held]
        rows = sum(result.num_rows for result in results)
        by_depth = zip(*(result.num_hits for result in results), strict=True)
        return [sum(hits) / max(1, rows) for hits in by_depth]

    def save(self, accuracy: list[float]) -> None:
        """Write the heads as the engine loads them, then the state to go on from."""
        config = self.learner.config() | {
            "held_out_top1": [round(each, 4) for each in accuracy],
            "num_training_steps": self.step,
        }
        write_heads(self.out, config, self.facts, self.learner.module)
        state = {
            "kind": self.args.kind,
            "target": self.facts.fingerprint,
            "heads": self.learner.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(state, self.out / "state.tmp")
        (self.out / "state.tmp").replace(self.out / "state.pt")
        print(
            f"step {self.step}, {self.seconds / 60:.1f} min: held-out top-1 {accuracy}", flush=True
        )


def held_out(target: Target, texts: Texts, written: list[list[int]], reach: int) -> list[Batch]:
    """Fixed batches: held-out texts, and where there is no corpus the last of the target's own."""
    rng = random.Random(1)
    pool = [texts.sequence(rng) for _ in range(HELD_OUT_SEQUENCES)] if texts.units else written
    pool = sorted((each for each in pool if len(each) > reach + 1), key=len)
    return [target.read(pool[start : start + 4]) for start in range(0, len(pool), 4)]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id of the target")
    parser.add_argument("--kind", required=True, choices=(medusa_heads.KIND, eagle_head.KIND))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--max-steps", type=int, default=1 << 30, help="stop here, if sooner")
    parser.add_argument("--corpus", type=Path, help="folder with train.jsonl and heldout.jsonl")
    parser.add_argument("--prompts", type=Path, help="JSON lines with prompt or messages")
    parser.add_argument("--written", type=int, default=256, help="texts for the target to write")
    parser.add_argument("--new-tokens", type=int, default=128, help="length of each")
    parser.add_argument("--num-heads", type=int, default=4, help="medusa: how far ahead")
    parser.add_argument("--num-layers", type=int, default=1, help="medusa: blocks per head")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--positions", type=int, default=512, help="rows per text and step")
    parser.add_argument("--save-every", type=float, default=3.0, help="minutes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    if args.corpus is None and args.prompts is None:
        parser.error("one of --corpus and --prompts is needed")
    if args.corpus is None and args.written < 8:
        parser.error("--written must be at least 8 where there is no --corpus")
    return args


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the held-out accuracy by depth."""
    args = parse(arguments)
    torch.manual_seed(args.seed)
    model = load_model(args.model, torch.device(args.device), args.dtype)
    tok = load_tokenizer(args.model)
    target, facts = Target(model), target_facts(model)
    args.out.mkdir(parents=True, exist_ok=True)
    learner = make_learner(args.kind, target, args)
    count = sum(parameter.numel() for parameter in learner.module.parameters())
    print(f"{args.kind}: {count / 1e6:.2f} M parameters", flush=True)
    trainer = Trainer(target, learner, facts, args.out, args)

    texts = load_texts(tok, args.corpus, args.prompts, "train.jsonl")
    rng = random.Random(f"{args.seed} {trainer.step}")
    samples = args.out / "samples.jsonl"
    written = write_samples(model, texts, rng, args.written, args.new_tokens, samples)
    held_written: list[list[int]] = []
    if args.corpus is None:
        share = max(4, len(written) // 10)
        written, held_written = written[:-share], written[-share:]
    held_texts = load_texts(tok, args.corpus, None, "heldout.jsonl")
    held = held_out(target, held_texts, held_written, learner.reach)
    groups = batches(texts, written, rng, TOKENS_PER_STEP, learner.reach + 2)
    accuracy = trainer.train(groups, held)
    print(json.dumps({"held_out_top1": accuracy}))
    return accuracy


if __name__ == "__main__":
    main()
