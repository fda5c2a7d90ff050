"""Train heads that draft for a model, from texts that it wrote (``training.written``).

The target is frozen and its own distributions are what is learnt, on replies alone. The budget is counted
in minutes of work: a run that is stopped and started again with the same --out goes on. The folder in
--out can be served at any time, each save replaces it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.drafting.published.methods import read_network
from training.head_data import Text, draft_ids, groups, load_texts, unused_token
from training.head_losses import Guesses, chosen_rows, distance, distilled, right
from training.learners import EAGLE3, KINDS, MEDUSA, P_EAGLE, Learner, Shape, make_learner
from training.target_states import Batch, States, Target

WARMUP_STEPS = 40
DECAYING = 0.5
"""The last part of the budget, in which the learning rate falls."""
LEAST_RATE = 0.02
ADAM_SHARE = 0.5
"""The learning rate of norms and the output head, beside that of matrices."""
TEXTS_AT_ONCE = 8
"""Texts of a held-out batch."""
LOG_EVERY = 10
_NUM_STEPS = {EAGLE3: 4, P_EAGLE: 8, MEDUSA: 4}
_NUM_LAYERS = {EAGLE3: 1, P_EAGLE: 2, MEDUSA: 1}
_POSITIONS = {EAGLE3: 1 << 20, P_EAGLE: 128, MEDUSA: 1 << 20}


class Trainer:
    """A learner, its optimisers, and what is needed to go on later. ``texts``: the first ``num_held`` of
    them are kept aside."""

    def __init__(
        self,
        target: Target,
        learner: Learner,
        states: States,
        texts: Sequence[Text],
        num_held: int,
        args: argparse.Namespace,
    ) -> None:
        self.target, self.learner, self.states, self.texts = target, learner, states, texts
        self.num_held, self.args = num_held, args
        learner.module.to(target.device)
        self.optimizers = _optimizers(learner.module, args.lr)
        self.rates = [each.param_groups[0]["lr"] for each in self.optimizers]
        ids = learner.shape.draft_ids
        self._teacher = target.head if ids is None else target.head[ids.to(target.device)]
        self.step = self.epoch = self.position = 0
        self.seconds = 0.0

    def restore(self, saved: dict[str, Any]) -> None:
        self.learner.module.load_state_dict(saved["heads"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.epoch, self.position = saved["epoch"], saved["position"]

    def train(self) -> list[float]:
        """Learns until the budget is used up; returns the held-out accuracy by step."""
        last_save = self.seconds
        steps = self._groups()
        while self.seconds < self.args.minutes * 60 and self.step < self.args.max_steps:
            self._learn(next(steps))
            if self.seconds - last_save > self.args.save_every * 60:
                last_save = self.seconds
                self.save(self.accuracy())
        accuracy = self.accuracy()
        self.save(accuracy)
        return accuracy

    def _groups(self) -> Iterator[list[int]]:
        """Yields groups of texts without end, from where the run is on."""
        args, learnt = self.args, range(self.num_held, len(self.texts))
        while True:
            rng = random.Random(f"{args.seed} {self.epoch}")
            for group in groups(self.texts, learnt, rng, args.rows, args.positions)[
                self.position :
            ]:
                self.position += 1
                yield group
            self.epoch, self.position = self.epoch + 1, 0

    def _learn(self, group: list[int]) -> None:
        began = time.monotonic()
        generator = torch.Generator().manual_seed(self.step)
        batch, guesses = self._guess(group, self.args.positions, generator)
        normed = batch.normed.flatten(0, 1)
        total = loss = distilled(guesses, self.learner.head(), normed, self._teacher)
        if self.args.state_weight:
            total = loss + self.args.state_weight * (1 - self._done()) * distance(guesses, normed)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.learner.module.parameters(), 1.0)
        scale = self._scale()
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            for part in optimizer.param_groups:
                part["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        taken = time.monotonic() - began
        self.seconds += taken
        if self.step % LOG_EVERY == 0:
            rows = int((guesses.steps == 0).sum())
            print(
                f"step {self.step}, {self.seconds / 60:.1f} min: loss {loss.item():.3f}, "
                f"{rows / taken:.0f} rows/s",
                flush=True,
            )

    def _done(self) -> float:
        """Returns how much of the budget is used up, of 1."""
        args = self.args
        return float(min(1.0, max(self.seconds / (args.minutes * 60), self.step / args.max_steps)))

    def _scale(self) -> float:
        left = min(1.0, (1 - self._done()) / DECAYING)
        return min((self.step + 1) / WARMUP_STEPS, max(LEAST_RATE, left))

    def _guess(
        self, group: Sequence[int], most: int, generator: torch.Generator
    ) -> tuple[Batch, Guesses]:
        batch = self.states.read(group)
        texts = [self.texts[index] for index in group]
        lengths = [len(text.ids) for text in texts]
        rows = chosen_rows([text.first_row for text in texts], lengths, most, generator)
        with self._mixed_precision():
            read = self.learner.read(self.target, batch, rows)
        return batch, Guesses.of(read, rows, batch.ids.shape[1])

    def _mixed_precision(self) -> torch.autocast:
        """The heads' own numbers stay float32; products are in bf16 where the target has 16 bits."""
        target = self.target
        return torch.autocast(
            target.device.type, torch.bfloat16, enabled=target.dtype != torch.float32
        )

    @torch.no_grad()
    def accuracy(self) -> list[float]:
        """Returns per step how often the heads' likeliest token is the target's, of its whole vocabulary,
        on held-out texts."""
        num_steps, head = self.learner.shape.num_steps, self.learner.head()
        ids = self.learner.shape.draft_ids
        ids = None if ids is None else ids.to(self.target.device)
        hits, rows = torch.zeros(num_steps), torch.zeros(num_steps)
        for start in range(0, self.num_held, TEXTS_AT_ONCE):
            group = range(start, min(self.num_held, start + TEXTS_AT_ONCE))
            batch, guesses = self._guess(group, 1 << 20, torch.Generator())
            likeliest = self.target.likeliest(batch.normed.flatten(0, 1))
            found = right(guesses, head, likeliest, ids)
            hits += torch.bincount(guesses.steps[found], minlength=num_steps).cpu()
            rows += torch.bincount(guesses.steps, minlength=num_steps).cpu()
        shares: list[float] = (hits / rows.clamp_min(1)).tolist()
        return shares

    def save(self, accuracy: list[float]) -> None:
        """Writes the folder that is served, then the state to go on from."""
        rounded = [round(each, 4) for each in accuracy]
        notes = {"held_out_top1": rounded, "num_training_steps": self.step}
        self.learner.write(self.args.out, notes)
        state = {
            "run": run_of(self.args, self.target),
            "shape": self.learner.shape._asdict(),
            "heads": self.learner.module.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "epoch": self.epoch,
            "position": self.position,
            "num_held": self.num_held,
        }
        torch.save(state, self.args.out / "state.tmp")
        (self.args.out / "state.tmp").replace(self.args.out / "state.pt")
        minutes = self.seconds / 60
        print(f"step {self.step}, {minutes:.1f} min: held-out top-1 {rounded}", flush=True)


def _optimizers(module: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Returns Muon for matrices between states, AdamW for all else: norms, biases, the output head."""
    named = dict(module.named_parameters())
    matrices = [name for name, each in named.items() if each.ndim == 2 and "lm_head" not in name]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(
            torch.optim.Muon(
                [named.pop(name) for name in matrices],
                lr=lr,
                weight_decay=0.02,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    rest = list(named.values())
    found.append(torch.optim.AdamW(rest, lr=lr * ADAM_SHARE, betas=(0.9, 0.95), weight_decay=0.0))
    return found


def run_of(args: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Returns what a run that goes on has to have in common with the one that began."""
    names = ("kind", "num_layers", "num_steps", "draft_vocab_size")
    return {name: getattr(args, name) for name in names} | {"target": target.facts.fingerprint}


def saved_state(args: argparse.Namespace, target: Target) -> dict[str, Any] | None:
    """Returns the state of a run that goes on; None: it begins. Raises ValueError where ``--out`` has a
    run that is another."""
    path: Path = args.out / "state.pt"
    if not path.exists():
        return None
    saved: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    for name, wanted in run_of(args, target).items():
        if saved["run"][name] != wanted:
            raise ValueError(
                f"--out {args.out} holds a run with {name} {saved['run'][name]}, not {wanted}"
            )
    return saved


def read_texts(args: argparse.Namespace, vocab_size: int) -> tuple[list[Text], int]:
    """Returns the texts that are kept aside and those to learn from, in this order, and how many the
    first are. Raises ValueError where too few are left."""
    learnt = load_texts(args.texts, vocab_size)
    if args.held_out is not None:
        held = load_texts(args.held_out, vocab_size)[: args.num_held_out]
    else:
        # The first, whatever the file gets behind them; no more than a tenth.
        num_held = min(args.num_held_out, len(learnt) // 10)
        held, learnt = learnt[:num_held], learnt[num_held:]
    if not held or not learnt:
        raise ValueError(f"{len(learnt)} texts to learn from and {len(held)} kept aside: too few")
    return [*held, *learnt], len(held)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="folder, file or hub id of the target")
    add("--kind", required=True, choices=KINDS)
    add("--texts", type=Path, required=True, help="file of training.written, by the same model")
    add("--out", type=Path, required=True)
    add("--minutes", type=float, required=True, help="of work, in all runs together")
    add("--max-steps", type=int, default=1 << 30, help="stop here, if sooner")
    add("--init", type=Path, help="folder of such heads, trained before, to begin with")
    add("--held-out", type=Path, help="file of training.written --held-out; else some of --texts")
    add("--num-held-out", type=int, default=48, help="most texts that are kept aside")
    add("--draft-vocab-size", type=int, default=0, help="its most frequent tokens; 0: all")
    add("--num-steps", type=int, help="tokens ahead: eagle3, medusa 4, p_eagle 8")
    add("--num-layers", type=int, help="decoder layers: eagle3 1, p_eagle 2; medusa: blocks, 1")
    add("--positions", type=int, help="rows of a text at once: p_eagle 128, else all")
    add("--rows", type=int, default=2048, help="about as many per step of training")
    add("--lr", type=float, default=2e-3, help="of matrices; norms, output head: half of it")
    add("--state-weight", type=float, default=0.0, help="of distances of states, at first")
    add("--save-every", type=float, default=3.0, help="minutes")
    add("--no-cache-states", action="store_true", help="run the target again for every text")
    add("--with-output-head", action="store_true", help="medusa: as vLLM reads it")
    add("--device", default="cpu")
    add("--dtype", default="auto")
    add("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    for name, usual in (
        ("num_steps", _NUM_STEPS),
        ("num_layers", _NUM_LAYERS),
        ("positions", _POSITIONS),
    ):
        if getattr(args, name) is None:
            setattr(args, name, usual[args.kind])
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.kind == P_EAGLE and args.num_steps < 2:
        parser.error("--num-steps must be at least 2 for p_eagle")
    if args.kind == MEDUSA and args.draft_vocab_size:
        parser.error("--draft-vocab-size is not for medusa, which has the target's output head")
    if args.kind == MEDUSA and args.init is not None:
        parser.error("--init is not for medusa")
    if args.init is not None and args.draft_vocab_size:
        parser.error("--draft-vocab-size is that of --init")
    return args


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains, and returns the held-out accuracy by step."""
    args = parse(arguments)
    torch.manual_seed(args.seed)
    target = Target(args.model, torch.device(args.device), args.dtype)
    args.out.mkdir(parents=True, exist_ok=True)
    saved = saved_state(args, target)
    if saved is not None and args.held_out is None:
        # Where the file has grown, what the run has learnt is not kept aside.
        args.num_held_out = min(args.num_held_out, saved.get("num_held", args.num_held_out))
    texts, num_held = read_texts(args, target.facts.vocab_size)
    first = None
    if saved is None and args.init is not None:
        first = read_network(args.kind, args.init, target.facts, target.model)
    shape = Shape(**saved["shape"]) if saved is not None else new_shape(args, texts, target, first)
    learner = make_learner(args.kind, target, shape, args)
    if first is not None:
        begin_with(learner, first)
    count = sum(parameter.numel() for parameter in learner.module.parameters())
    print(f"{args.kind}: {count / 1e6:.2f} M parameters, {len(texts)} texts", flush=True)
    states = States(target, texts, None if args.no_cache_states else args.out / "states.bin")
    trainer = Trainer(target, learner, states, texts, num_held, args)
    if saved is not None:
        trainer.restore(saved)
    accuracy = trainer.train()
    print(json.dumps({"held_out_top1": accuracy}))
    return accuracy


def begin_with(learner: Learner, first: Any) -> None:
    """Gives a learner of EAGLE-3 or P-EAGLE the weights of a network that was trained before. Raises
    ValueError where this has other shapes or parts."""
    try:
        learner.module.network.load_state_dict(first.state_dict())
    except RuntimeError as error:
        raise ValueError(f"--init: {error}") from error


def new_shape(args: argparse.Namespace, texts: Sequence[Text], target: Target, first: Any) -> Shape:
    """``first``: the network to begin with, whose vocabulary stays, or None."""
    if first is not None:
        return Shape(args.num_steps, args.num_layers, first.token_map, first.mask_token_id)
    ids: Tensor | None = None
    vocab_size = target.facts.vocab_size
    if args.kind != MEDUSA:
        ids = draft_ids(texts, vocab_size, args.draft_vocab_size)
    mask = unused_token(texts, vocab_size) if args.kind == P_EAGLE else None
    return Shape(args.num_steps, args.num_layers, ids, mask)


if __name__ == "__main__":
    main()
