"""A request to the engine: plain, immutable, checked by the server before it comes here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from drafters.options import PLAIN as PLAIN
from drafters.options import SpeculativeParams as SpeculativeParams
from drafters.options import VerificationName as VerificationName

Pooling = Literal["none", "mean", "last"]
"""How the states of a text become one embedding: their mean, or the last one's. "none": not at all."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from a row of logits, and when to stop.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 are off. ``logprobs`` is None for none, else
    the number of alternatives reported next to the chosen token. ``prompt_logprobs`` likewise, for
    the prompt's own tokens. Penalties follow OpenAI (presence, frequency: output tokens only) and
    the CTRL paper (repetition: prompt and output).
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    choice_index: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    """Reported wherever log-probabilities are, whether or not they are among the likeliest."""
    grammar: str = ""
    """The output has to match this, as llguidance's ``grammar_from_*`` give it; "": anything."""
    grammar_fields: tuple[tuple[str, str], ...] = ()
    """Fields of the request and the grammars that ``grammar`` was made of: a refusal names the one that
    is at fault."""
    further: Mapping[str, Any] = field(default_factory=dict)
    """Values of parameters that nothing but their logits processor reads, by name."""

    def get(self, name: str, default: Any) -> Any:
        """The value of a logits processor's parameter."""
        return self.further.get(name, getattr(self, name, default))


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose requests they are, and on what terms: of all tenants that wait, each is written tokens in
    proportion to its ``weight``. None: no limit. Limits hold over everybody who sends its requests; the
    terms that came with the newest request count.

    ``requests_per_minute`` counts prompts, ``tokens_per_minute`` their tokens and those written.
    """

    name: str = ""
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None


class Batch(NamedTuple):
    """The choices that a client asked for at once: they are let in together, or none is. ``num_tokens``:
    of all its prompts. ``num_at_once``: only the tenant's rates have room for all of them, and so many
    come at a time, further ones as others end."""

    name: str
    num_choices: int
    num_prompts: int
    num_tokens: int
    num_at_once: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to write. ``priority``: lower runs first. ``cache_salt``: what is cached or learned
    under one serves no other. ``adapter``: the name of the one that changes the model for it; None: it
    is the model's as it is. ``pooling``: nothing is written, the end brings the prompt's embedding."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculative: SpeculativeParams = PLAIN
    priority: int = 0
    cache_salt: str = ""
    adapter: str | None = None
    arrival_time: float = 0.0
    """``time.perf_counter()`` at arrival; seconds."""
    deadline: float | None = None
    """On the same clock: what is not done by then ends with ``DeadlineExceededError``."""
    tenant: Tenant = Tenant()
    batch: Batch | None = None
    prediction_token_ids: tuple[int, ...] = ()
    """The client expects the output to be this for the most part; for drafters that take it."""
    pooling: Pooling = "none"
