"""``slipstream quantize``: write a model's weights in 8 or 4 bits, and say what that changes."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

_DESCRIPTION = """Write SRC's linear weights in 8 bits to the folder DST, in compressed-tensors' format
"int-quantized": `slipstream serve DST` loads it as it is. (`slipstream serve SRC --quantization int8`
rounds at every start, in groups of 32, which is finer.)

With --bits 4, write them in its format "pack-quantized", in groups of 32, rounded by what the layers read
(GPTQ) on --calibration FILE or, without one, on text that the model writes itself. What that changes is
always measured and said: on the text of --check, else on an eighth of the text to calibrate on, which is
held back for it.

With --check FILE, compare SRC in few bits with SRC as it is, on any text: loss, Kullback-Leibler
divergence of the next token's distribution, how often both think the same token the likeliest, and the
layers that rounding changes most. In 8 bits that is of the weights that DST gets, without DST of those of
--quantization int8. With --most-kl X, nothing is written above that divergence, and the exit status is
3."""

_TOKENS, _CALIBRATION_TOKENS = 8192, 16384
_MOST_NAMED = 5
_GOOD_KL = 0.05
"""The cost of the coarsest served 8-bit scheme on SmolLM2: one token in nine changes."""
_TOO_FAR = 3


def add_quantize(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand; it explains what it cannot do in one line and exits with status 2."""
    parser = commands.add_parser(
        "quantize",
        help="write a model in 8 or 4 bits, or measure what that changes",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("src", metavar="SRC", help="folder, GGUF file, hub id, bundled or smollm2")
    parser.add_argument("dst", metavar="DST", type=Path, nargs="?", help="folder to make")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=8, help="default: 8")
    parser.add_argument(
        "--calibration", metavar="FILE", type=Path, help="text for 4 bits (default: SRC's own)"
    )
    parser.add_argument(
        "--calibration-tokens", type=int, help=f"of it at most (default: {_CALIBRATION_TOKENS})"
    )
    parser.add_argument("--check", metavar="FILE", type=Path, help="text to compare on")
    parser.add_argument("--tokens", type=int, help=f"of the text at most (default: {_TOKENS})")
    parser.add_argument(
        "--most-kl", metavar="X", type=float, help="write nothing above this divergence"
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.add_argument("--dtype", default="auto", help="of the source (default: auto)")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="as for serve")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level="WARNING")
    # What takes minutes says how far it is.
    logging.getLogger("engine.model.calibration").setLevel("INFO")
    fault = _fault(arguments)
    if fault is not None:
        return _refuse(fault)
    arguments.tokens = arguments.tokens or _TOKENS
    arguments.calibration_tokens = arguments.calibration_tokens or _CALIBRATION_TOKENS
    # Imported late: torch takes seconds to load, and --help needs none of it.
    from engine.request.errors import EngineError

    try:
        return _in_4_bits(arguments) if arguments.bits == 4 else _in_8_bits(arguments)
    except (EngineError, ValueError, OSError) as error:
        return _refuse(str(error))


def _fault(arguments: argparse.Namespace) -> str | None:
    """Returns what is wrong with the arguments; None: nothing."""
    if arguments.dst is None and arguments.check is None:
        return "nothing to do: name a folder DST, or a text with --check"
    if arguments.dst is not None and arguments.dst.exists():
        if not arguments.dst.is_dir():
            return f"{arguments.dst} is no folder"
        if any(arguments.dst.iterdir()):
            return f"{arguments.dst} is not empty"
    for flag, least in (("tokens", 2), ("calibration_tokens", 32)):
        if (given := getattr(arguments, flag)) is not None and given < least:
            return f"{_spelled(flag)} must be at least {least}"
    if arguments.most_kl is not None and not 0 < arguments.most_kl < float("inf"):
        return "--most-kl must be a number above 0"
    if arguments.bits == 4:
        return None
    for flag in ("calibration", "calibration_tokens"):
        if getattr(arguments, flag) is not None:
            return f"{_spelled(flag)} is for --bits 4: nothing is calibrated in 8 bits"
    for flag in ("most_kl", "tokens", "json") if arguments.check is None else ():
        if getattr(arguments, flag):
            return f"{_spelled(flag)} in 8 bits needs a text: --check FILE"
    return None


def _spelled(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"


def _in_8_bits(arguments: argparse.Namespace) -> int:
    if arguments.check is not None:
        found = _check_8_bits(arguments)
        _report(found, arguments)
        if _too_far(found, arguments):
            return _TOO_FAR
    if arguments.dst is not None:
        from slipstream.tools.quantize.written import store_int8

        model, tokenizer = _load(arguments)
        names = store_int8(model)
        _save(model, tokenizer, arguments, len(names))
    return 0


def _in_4_bits(arguments: argparse.Namespace) -> int:
    from engine.model.calibration.sequence import quantize_4_bits
    from engine.model.calibration.texts import calibration_texts
    from slipstream.tools.quantize.written import WrittenLinear, has_place, store_4_bits

    model, tokenizer = _load(arguments)
    text = arguments.calibration and arguments.calibration.read_text(encoding="utf-8")
    checked = None if arguments.check is None else _token_ids(arguments, tokenizer)
    texts = calibration_texts(model, tokenizer, text, arguments.calibration_tokens)
    if checked is None:
        held_back = max(1, len(texts) // 8)
        if len(texts) == held_back:
            raise ValueError("the text to calibrate on is too short to hold a part back: --check")
        checked = texts[-held_back:].flatten().tolist()[: arguments.tokens]
        texts = texts[:-held_back]
    num_layers = store_4_bits(model, quantize_4_bits(model, texts, takes=has_place))
    if not num_layers:
        raise ValueError(f"{arguments.src}: no linear layer can be written in groups of 32")
    found = _comparison(arguments, model, checked, (WrittenLinear,))
    _report(found, arguments)
    if _too_far(found, arguments):
        return _TOO_FAR
    if arguments.dst is not None:
        _save(model, tokenizer, arguments, num_layers)
    return 0


def _load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    import torch

    from engine.model.loader import load_model, load_tokenizer

    how = (arguments.revision, arguments.trust_remote_code)
    model = load_model(arguments.src, torch.device("cpu"), arguments.dtype, *how, packed=False)
    return model, load_tokenizer(arguments.src, *how)


def _save(model: Any, tokenizer: Any, arguments: argparse.Namespace, num_layers: int) -> None:
    from engine.machine import let_others_read

    model.save_pretrained(arguments.dst)
    tokenizer.save_pretrained(arguments.dst)
    for each in arguments.dst.iterdir():
        let_others_read(each)
    if not arguments.json:
        _say(f"{arguments.dst}: {num_layers} linear layers in {arguments.bits} bits")


def _check_8_bits(arguments: argparse.Namespace) -> dict[str, Any]:
    from engine.model.layers import GroupedLinear
    from engine.model.quantization import quantization_info, quantize_model, replace_linears
    from slipstream.tools.quantize.written import rounded_to_int8

    quantized, tokenizer = _load(arguments)
    token_ids = _token_ids(arguments, tokenizer)
    if arguments.dst is None:
        quantize_model(quantized)
    else:
        replace_linears(quantized, rounded_to_int8(quantized), "int8")
    info = quantization_info(quantized)
    assert info is not None, "a model without linear layers is refused"
    return _comparison(arguments, quantized, token_ids, (GroupedLinear,), info.share)


def _token_ids(arguments: argparse.Namespace, tokenizer: Any) -> list[int]:
    """Returns the tokens of the text to compare on."""
    text = arguments.check.read_text(encoding="utf-8")
    found: list[int] = tokenizer.encode(text, add_special_tokens=False)[: arguments.tokens]
    if len(found) < 2:
        raise ValueError(f"{arguments.check} has fewer than two tokens")
    return found


def _comparison(
    arguments: argparse.Namespace,
    quantized: Any,
    token_ids: list[int],
    kinds: tuple[type[Any], ...],
    share: float | None = None,
) -> dict[str, Any]:
    """Compares with the source, loaded anew. ``kinds``: of quantized layers; ``share``: of parameters
    that are quantized, None: all of these layers'."""
    from slipstream.tools.quantize.check import compare, layer_errors

    model, _ = _load(arguments)
    if share is None:
        layers = [each for each in quantized.modules() if isinstance(each, kinds)]
        in_few = sum(each.in_features * each.out_features for each in layers)
        share = in_few / sum(each.numel() for each in model.parameters())
    return {
        "bits": arguments.bits,
        "share_quantized": share,
        **compare(model, quantized, token_ids, arguments.bits),
        "layer_errors": layer_errors(model, quantized, token_ids, kinds),
    }


def _report(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    bits = arguments.bits
    loss, changed = found["loss"], found[f"loss_int{bits}"]
    lines = [
        f"tokens compared      {found['num_tokens']:.0f}",
        f"parameters in {bits} bits {found['share_quantized']:.1%}",
        f"loss                 {loss:.4f}, in {bits} bits {changed:.4f} ({changed / loss - 1:+.2%})",
        f"KL divergence        {found['kl']:.5f}",
        f"same likeliest token {found['same_argmax']:.1%}",
    ]
    worst = list(found["layer_errors"].items())[:_MOST_NAMED]
    lines += [f"layer's error        {error:.2%} {name}" for name, error in worst]
    _say(json.dumps(found) if arguments.json else "\n".join(lines))


def _too_far(found: dict[str, Any], arguments: argparse.Namespace) -> bool:
    """Says where the divergence is too large; returns whether nothing may be written."""
    most: float | None = arguments.most_kl
    if most is not None and not found["kl"] <= most:
        _warn(f"KL divergence {found['kl']:.4f} is above {most:g}: nothing is written")
        return True
    if not found["kl"] <= _GOOD_KL:
        better = "8 bits or a larger model" if arguments.bits == 4 else "its own type"
        _warn(
            f"warning: KL divergence {found['kl']:.4f} is above {_GOOD_KL}: this model does not survive "
            f"{arguments.bits} bits; take {better}"
        )
    return False


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _warn(message: str) -> None:
    sys.stderr.write(f"slipstream quantize: {message}\n")


def _refuse(message: str) -> int:
    _warn(message)
    return 2
