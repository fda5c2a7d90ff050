"""``slipstream quantize``: write a model's weights in 8 bits, and say what that changes."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

_DESCRIPTION = """Write SRC's linear weights in 8 bits to the folder DST, in compressed-tensors' format
"int-quantized": `slipstream serve DST` loads it as it is. (`slipstream serve SRC --quantization int8`
serves the same weights, quantised at every start.)

With --check FILE, compare SRC in 8 bits with SRC as it is, on any text: loss, Kullback-Leibler
divergence of the next token's distribution, how often both think the same token the likeliest, and the
layers that rounding changes most."""

_MOST_NAMED = 5


def add_quantize(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand; it explains what it cannot do in one line and exits with status 2."""
    parser = commands.add_parser(
        "quantize",
        help="write a model in 8 bits, or measure what that changes",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("src", metavar="SRC", help="folder, GGUF file, hub id, bundled or smollm2")
    parser.add_argument("dst", metavar="DST", type=Path, nargs="?", help="folder to make")
    parser.add_argument("--check", metavar="FILE", type=Path, help="text to compare on")
    parser.add_argument(
        "--tokens", type=int, default=8192, help="of the text at most (default: 8192)"
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.add_argument("--dtype", default="auto", help="of the source (default: auto)")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="as for serve")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level="WARNING")
    if arguments.dst is None and arguments.check is None:
        return _refuse("nothing to do: name a folder DST, or a text with --check")
    if arguments.dst is not None and arguments.dst.exists() and any(arguments.dst.iterdir()):
        return _refuse(f"{arguments.dst} is not empty")
    if arguments.tokens < 2:
        return _refuse("--tokens must be at least 2")
    # Imported late: torch takes seconds to load, and --help needs none of it.
    from engine.request.errors import EngineError

    try:
        if arguments.check is not None:
            _report(_check(arguments), arguments.json)
        if arguments.dst is not None:
            _write(arguments)
    except (EngineError, ValueError, OSError) as error:
        return _refuse(str(error))
    return 0


def _load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    import torch

    from engine.model.loader import load_model, load_tokenizer
    from engine.model.quantization import has_packed_weights

    how = (arguments.revision, arguments.trust_remote_code)
    model = load_model(arguments.src, torch.device("cpu"), arguments.dtype, *how)
    if has_packed_weights(model):
        raise ValueError(f"{arguments.src}: its weights are in few bits already")
    return model, load_tokenizer(arguments.src, *how)


def _write(arguments: argparse.Namespace) -> None:
    from engine.model.quantization import store_int8

    model, tokenizer = _load(arguments)
    names = store_int8(model)
    model.save_pretrained(arguments.dst)
    tokenizer.save_pretrained(arguments.dst)
    _say(f"{arguments.dst}: {len(names)} linear layers in 8 bits")


def _check(arguments: argparse.Namespace) -> dict[str, Any]:
    from engine.model.quantization import quantization_info, quantize_model
    from slipstream.tools.quantize.check import compare, layer_errors

    text = arguments.check.read_text(encoding="utf-8")
    model, tokenizer = _load(arguments)
    token_ids = tokenizer.encode(text, add_special_tokens=False)[: arguments.tokens]
    if len(token_ids) < 2:
        raise ValueError(f"{arguments.check} has fewer than two tokens")
    quantized, _ = _load(arguments)
    quantize_model(quantized)
    info = quantization_info(quantized)
    assert info is not None
    return {
        "share_quantized": info.share,
        **compare(model, quantized, token_ids),
        "layer_errors": layer_errors(model, quantized, token_ids),
    }


def _report(found: dict[str, Any], as_json: bool) -> None:
    change = found["loss_int8"] / found["loss"] - 1
    lines = [
        f"tokens compared      {found['num_tokens']:.0f}",
        f"parameters in 8 bits {found['share_quantized']:.1%}",
        f"loss                 {found['loss']:.4f}, in 8 bits {found['loss_int8']:.4f} ({change:+.2%})",
        f"KL divergence        {found['kl']:.5f}",
        f"same likeliest token {found['same_argmax']:.1%}",
    ]
    worst = list(found["layer_errors"].items())[:_MOST_NAMED]
    lines += [f"layer's error        {error:.2%} {name}" for name, error in worst]
    _say(json.dumps(found) if as_json else "\n".join(lines))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _refuse(message: str) -> int:
    sys.stderr.write(f"slipstream quantize: {message}\n")
    return 2
