"""Who takes turns: plain decoding, the default drafter, ``auto``, and those that may beat both."""

from __future__ import annotations

from bench.cells.figures import AUTO, PLAIN
from bench.cells.options import Options
from bench.contenders import Contender, EngineContender, parse_drafter
from bench.models import BUNDLED, OWN, BenchModel, load_bench_model
from engine.config import EngineConfig
from engine.drafting.drafts import with_bundled_drafts
from engine.request.info import EngineInfo
from engine.request.params import PLAIN as PLAIN_DECODING
from engine.request.params import SpeculativeParams

_FREE = ("suffix", "stand", "recycling")


def default_drafter() -> str:
    """What drafts for a request that says nothing."""
    return SpeculativeParams().draft_strategy


def load_core(options: Options) -> BenchModel:
    """The engine as it is served, with the drafts that come for the model."""
    config = EngineConfig(
        model=BUNDLED if options.model in OWN else options.model,
        quantization=options.quantization,
        max_num_seqs=max(options.at_once),
    )
    return load_bench_model(options.model, with_bundled_drafts(config), with_transformers=False)


def make_contenders(options: Options, model: BenchModel) -> list[Contender]:
    """Plain decoding first. Exits with a message for a drafter that the engine does not have."""
    contenders: list[Contender] = [EngineContender(PLAIN, model.core, PLAIN_DECODING)]
    for text in options.drafters or usual_drafters(model.info):
        try:
            name, speculative = parse_drafter(text, sorted(model.info.drafters))
        except ValueError as error:
            raise SystemExit(str(error)) from error
        contenders.append(EngineContender(name, model.core, speculative))
    return contenders


def usual_drafters(info: EngineInfo) -> tuple[str, ...]:
    """The default, ``auto``, the free ones that gain most on texts, and what comes for the model."""
    wanted = dict.fromkeys((default_drafter(), AUTO, *_FREE, *info.drafts))
    return tuple(name for name in wanted if name in info.drafters)
