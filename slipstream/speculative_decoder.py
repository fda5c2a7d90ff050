"""``SpeculativeDecoder``: the draft-verify module's interface, thin over the engine's core.

One request at a time, on the caller's thread, with the same step that serves batches: the output is
what the target alone writes for the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from engine.build import build_engine
from engine.config import EngineConfig
from engine.process.threaded import AsyncEngine
from engine.request.events import ErrorEvent, FinishInfo
from engine.request.params import GenerationRequest
from engine.request.stats import SpeculativeStats
from engine.speculation.gamma.target_rate import SteeredGamma
from slipstream.speculative_config import SpeculativeConfig


class SpeculativeDecoder:
    """``setup`` once, ``decode_step`` for each text, ``report`` on all of them since ``setup``."""

    def __init__(self, engine_config: EngineConfig | None = None, seed: int = 0) -> None:
        """``engine_config``: sizes and device of the engine; ``seed`` makes sampled texts repeatable."""
        self._base = engine_config or EngineConfig(max_num_seqs=1)
        self._seed = seed
        self._engine: AsyncEngine | None = None
        self._loaded = SpeculativeConfig()
        self._config = SpeculativeConfig()
        self._ids = count()
        self._depth = SteeredGamma(0)
        self._total = SpeculativeStats()

    def setup(self, verify_model_path: str, config: SpeculativeConfig) -> None:
        """Load the target and what drafts for it.

        Raises OSError where there is no such model, UnsupportedModelError and
        DrafterUnavailableError with the reason where it cannot be used.
        """
        engine, _ = build_engine(config.engine_config(verify_model_path, self._base))
        self._engine = engine
        self._loaded = config
        self._config = config
        self._depth = SteeredGamma(config.num_speculative_tokens)
        self._total = SpeculativeStats()

    def decode_step(
        self,
        prompt_tokens: Sequence[int],
        max_new_tokens: int,
        config: SpeculativeConfig | None = None,
    ) -> tuple[list[int], dict[str, float]]:
        """Write up to ``max_new_tokens`` tokens after the prompt; returns them and the account.

        ``config`` may change depth, tree, policy and sampling between calls, not what is loaded.
        Latencies in the account are milliseconds per step. Raises RuntimeError before ``setup``,
        ValueError for a config that needs another ``setup``, RequestError for what cannot run, and the
        engine's error where the text failed; others can be written after it.
        """
        if self._engine is None:
            raise RuntimeError("call setup first")
        if config is not None and config != self._config:
            self._use(config)
        config = self._config
        request = GenerationRequest(
            f"decode-{next(self._ids)}",
            tuple(prompt_tokens),
            config.sampling_params(max_new_tokens, self._seed),
            config.speculative_params(self._depth.gamma if config.adaptive_depth else None),
        )
        token_ids, finish = _run(self._engine, request)
        stats = finish.speculative
        self._total += stats
        if stats.acceptance_rate is not None and config.adaptive_depth:
            self.adjust_speculative_depth(stats.acceptance_rate)
        return token_ids, self._account(stats)

    def get_acceptance_rate(self) -> float:
        """Accepted over verified drafts since ``setup``; 0 where nothing was drafted."""
        return self._total.acceptance_rate or 0.0

    def adjust_speculative_depth(self, acceptance_rate: float) -> int:
        """Take in a rate, and move the depth of the next text's first draft within the config's bounds as
        the policy "target_rate" moves gamma within a text (``SteeredGamma``). Returns that depth.

        Raises ValueError for a rate outside 0..1.
        """
        if not 0 <= acceptance_rate <= 1:
            raise ValueError("acceptance_rate must lie between 0 and 1")
        config = self._config
        self._depth.adjust(
            acceptance_rate,
            config.target_acceptance_rate,
            config.min_speculative_tokens,
            config.max_speculative_tokens,
        )
        return self._depth.gamma

    def report(self) -> dict[str, float]:
        """The account of all texts since ``setup``, as in ``decode_step``."""
        return self._account(self._total)

    def _use(self, config: SpeculativeConfig) -> None:
        if self._loading(config) != self._loading(self._loaded):
            raise ValueError("this config needs other models than those loaded: call setup with it")
        if config.num_speculative_tokens != self._config.num_speculative_tokens:
            self._depth.gamma = config.num_speculative_tokens
        low, high = config.min_speculative_tokens, config.max_speculative_tokens
        self._depth.gamma = max(low, min(self._depth.gamma, high))
        self._config = config

    def _loading(self, config: SpeculativeConfig) -> EngineConfig:
        # Whatever the target is: it is the one that was loaded.
        return config.engine_config("target", self._base)

    def _account(self, stats: SpeculativeStats) -> dict[str, float]:
        num_steps, config = stats.num_steps, self._config
        account = {
            "num_steps": float(num_steps),
            "num_tokens": float(stats.num_emitted_tokens),
            "tokens_per_step": stats.tokens_per_step or 0.0,
            "draft_latency": 1000.0 * stats.draft_seconds / num_steps if num_steps else 0.0,
            "verify_latency": 1000.0 * stats.verify_seconds / num_steps if num_steps else 0.0,
            "speculative_depth": float(
                self._depth.gamma if config.adaptive_depth else config.num_speculative_tokens
            ),
        }
        if config.log_acceptance_rate:
            account["acceptance_rate"] = stats.acceptance_rate or 0.0
        if config.log_speedup:
            speedup = stats.estimated_speedup
            account["speedup"] = 1.0 if speedup is None else speedup
        return account


def _run(engine: AsyncEngine, request: GenerationRequest) -> tuple[list[int], FinishInfo]:
    """Step the core until the request has ended. Raises the error it ended with, if it failed. Nothing of
    one that is interrupted comes up with the next."""
    engine.runtime.check(request)
    core = engine.core
    core.submit(core.prepare(request))
    token_ids: list[int] = []
    try:
        while True:
            for event in core.step().events:
                if isinstance(event, ErrorEvent):
                    raise event.error
                token_ids += event.token_ids
                if event.finish is not None:
                    return token_ids, event.finish
    except BaseException:
        core.abort(request.request_id)
        core.take_result()
        raise
