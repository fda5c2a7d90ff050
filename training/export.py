"""Put a training run's models into the folders the engine ships, with their model cards."""

from __future__ import annotations

import argparse
import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

from training.hybrid import load
from training.tokenizer import save_tokenizer

CARD = """---
license: apache-2.0
language: [en, code]
pipeline_tag: text-generation
---

# Slipstream bundled {name} model

This is a {kind} model of {params:.2f} M parameters, trained {origin} on two CPU cores
for this project. It exists so that the server can be tried, tested and measured without a
download. It is not a useful programming assistant.

| | |
| --- | --- |
| layers, hidden size, MLP size | {layers}, {hidden}, {ffn} |
| query heads, key-value heads, head size | {heads}, {kv_heads}, {head_dim} |
| vocabulary, longest context | {vocab} (byte-level BPE), {context} tokens |
| weights | bf16, tied embeddings, {megabytes:.1f} MB |
| training | {tokens:.1f} M tokens, {minutes} minutes of active time, {steps} steps |

{together}

## What it can and cannot do

{abilities}

## Measurements

Everything below is from files that training never read (3 % of all files, chosen by a hash of
their path), without those whose lines mostly occur in the training files as well. Edits ask
for one change in a file of 150 to 450 tokens; greedy decoding. `python -m training.evaluate`
repeats it.

| | |
| --- | --- |
{measurements}

## Training data

The models read single functions and classes and short modules from the Python standard library and
from {packages} packages whose own metadata declares an MIT, BSD, Apache, ISC or PSF licence.
Long docstrings are cut to their first line. About half of the tokens are edits made from the
same code by program (see `training/`). The sources keep their licences and copyrights:

| source | licence as declared |
| --- | --- |
{sources}
"""

ABILITIES = {
    "target": """It continues Python code in plausible Python, though names and logic often do
not fit together and greedy continuations sometimes repeat a line. In the chat format (an
instruction, then the code) it mostly copies the code and often, not reliably, applies the
requested change: repeating short code works, renaming and replacing are usually incomplete, and
in code of more than a few lines some tokens are copied wrongly. It knows no facts and answers
no questions.""",
    "draft": """It proposes tokens for the target of the same project and is of little use by
itself: its Python is less coherent, and it copies less reliably.""",
    "hybrid": """It does as the bundled target does, less well: its Python is less coherent, most of
its greedy continuations end in a loop, and it copies less reliably. It is there so that models with
states and MTP layers can be tried and tested.""",
}

TOGETHER = {
    "hybrid": """Three of its four layers keep a state by the gated delta rule (16 value heads of 16, 4
key heads of 32), the fourth attends. The MTP layer (`mtp.*`) is a fifth, which attends; it learnt from
what the model itself says. The model learnt from the text and from the distribution of the bundled
target, whose tokenizer it has, and began with as much of the target's embedding as it has room for.""",
    "": """The target and the draft share one tokenizer and were trained in the same loop on the same
batches.""",
}
LABELS = {
    "loss per token, code": "{code_loss:.3f}",
    "perplexity, code": "{code_perplexity:.1f}",
    "next token right, code": "{code_top1:.0%}",
    "of 120 tokens, the last 30 repeat with a period of 15 or less": (
        "greedy {repeating_greedy} of {code_completions}, "
        "temperature 0.8 {repeating_t08} of {code_completions}"
    ),
    "loss per answer token, edits": "{edit_loss:.3f}",
    "next token right, edit answers": "{edit_token_accuracy:.1%}",
    "next token right, what an edit changes": "{edit_changed_accuracy:.0%}",
    "edits whose whole answer is exactly right": "{edits_exact} of {edits}",
    "same most likely token as the target, code": "{code_agree:.0%}",
    "same most likely token as the target, edit answers": "{edit_agree:.0%}",
    "expected acceptance by the target at temperature 1, code": "{code_accept:.0%}",
    "expected acceptance by the target at temperature 1, edit answers": "{edit_accept:.0%}",
}


def measurements(measured: dict[str, Any]) -> str:
    """Return the card's table of what was measured, without what was not."""
    lines = []
    for label, form in LABELS.items():
        with contextlib.suppress(KeyError):
            lines.append(f"| {label} | {form.format_map(measured).replace('%', ' %')} |")
    return "\n".join(lines)


def export(
    name: str,
    run: Path,
    tokenizer: Path,
    out: Path,
    sources: list[dict[str, Any]],
    before: tuple[float, float, float],
) -> None:
    """Write one model folder; measurements are taken from `<run>/<name>.eval.json` if there.

    `before` is what the run that this one continued had done: million tokens, minutes, steps.
    """
    data = run / f"{name}.eval.json"
    is_hybrid = name == "hybrid"
    read: Any = (
        load if is_hybrid else partial(LlamaForCausalLM.from_pretrained, dtype=torch.bfloat16)
    )
    model = read(run / name)
    tok: Any = AutoTokenizer.from_pretrained(tokenizer)
    folder = out / name
    make_config: Any = GenerationConfig  # its constructor is not annotated
    model.generation_config = make_config(
        bos_token_id=tok.bos_token_id, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id
    )
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    save_tokenizer(tok, folder)
    measured = json.loads(data.read_text()) if data.exists() else {}
    state = torch.load(run / "state.pt", weights_only=True)
    config = model.config
    card = CARD.format(
        name=name,
        kind="Qwen3.5-architecture hybrid" if is_hybrid else "Llama-architecture",
        origin="by the bundled target" if is_hybrid else "from scratch",
        together=TOGETHER["hybrid" if is_hybrid else ""],
        params=sum(p.numel() for p in model.parameters()) / 1e6,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        megabytes=(folder / "model.safetensors").stat().st_size / 1e6,
        tokens=before[0] + state["tokens"] / 1e6,
        minutes=round(before[1] + state["active"] / 60),
        steps=round(before[2] + state["step"]),
        abilities=ABILITIES[name],
        measurements=measurements(measured),
        packages=len(sources) - 1,
        sources="\n".join(f"| {s['name']} {s['version']} | {s['licence']} |" for s in sources),
    )
    (folder / "README.md").write_text(card)


def main() -> None:
    """Export the models of a run."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("engine/bundled"))
    parser.add_argument(
        "--before",
        nargs=3,
        type=float,
        default=(0.0, 0.0, 0.0),
        metavar=("MTOKENS", "MINUTES", "STEPS"),
        help="what was done by the run whose weights this one started from",
    )
    parser.add_argument("--names", nargs="+", default=["target", "draft"], help="or hybrid")
    args = parser.parse_args()
    sources = json.loads((args.corpus / "sources.json").read_text())
    for name in args.names:
        export(name, args.run, args.tokenizer, args.out, sources, tuple(args.before))
        print(f"{args.out / name}: {sum(f.stat().st_size for f in (args.out / name).iterdir())} B")


if __name__ == "__main__":
    main()
