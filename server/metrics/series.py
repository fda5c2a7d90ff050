"""The series of our own metrics: what each shows, and its labels."""

from __future__ import annotations

from typing import Any

PREFIX = "slipstream_"
_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_RATE = tuple(step / 10 for step in range(1, 11))
_SPEEDUP = (0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 2.5, 3, 4, 6)

# By name, after "slipstream_": what it counts, and its labels.
COUNTERS = {
    "spec_draft_tokens": ("Draft tokens verified.", "drafter"),
    "spec_accepted_tokens": ("Draft tokens accepted.", "drafter"),
    "spec_accepted_tokens_per_position": ("Accepted, by depth from 0.", "drafter", "position"),
    "spec_emitted_tokens": ("Tokens emitted, the target's own included.", "drafter"),
    "spec_steps": ("Decoding steps of requests, those without a draft included.", "drafter"),
    "spec_disabled": ("Proposals of requests cut to nothing.", "drafter", "reason"),
    "spec_draft_seconds": ("Requests' share of drafting.", "drafter"),
    "spec_verify_seconds": ("Requests' share of forward and verify.", "drafter"),
    "spec_draft_failures": ("Drafts lost to an error in the drafter.",),
    "steps": ("Engine steps.",),
    "rows": ("Rows through the target's forward.",),
    "prompt_tokens": ("Prompt tokens computed.",),
    "generation_tokens": ("Tokens emitted.",),
    "step_seconds": ("Time of engine steps.", "part"),
    "baseline_seconds": ("Estimated time of the same tokens at gamma 0.",),
    "decode_seconds": ("Time of the steps that slipstream_baseline_seconds estimates.",),
    "preemptions": ("Requests preempted.",),
    "prefix_cache_queries": ("Prompt tokens looked up.",),
    "prefix_cache_hits": ("Prompt tokens found.",),
    "state_hits": ("Requests that began from a kept state.",),
    "kv_events": ("KV events sent.",),
    "kv_events_dropped": ("KV events lost because too many were waiting to be sent.",),
    "kv_offload_restored_tokens": ("Prompt tokens whose evicted blocks were brought back.",),
    "kv_offload_damaged": ("Kept blocks that were found damaged.",),
    "kv_offload_dropped": ("Evicted blocks that could not be kept.",),
    "requests": ("Choices by how they ended.", "finish_reason"),
    "rejections": ("Requests turned away.", "reason"),
    "tenant_requests": ("Choices of a tenant by how they ended.", "tenant", "finish_reason"),
    "tenant_tokens": ("Tokens of a tenant's choices that were done.", "tenant", "kind"),
    "tenant_rejections": (
        "Choices of a tenant turned away by a limit, and its requests of /tokenize and /detokenize.",
        "tenant",
        "reason",
    ),
    "http_requests": ("Answers.", "method", "path", "status"),
    "connections_cut_off": ("Connections of clients that took too long.", "waiting_for"),
    "speculative_changes": ("Changes of speculative defaults and caps while serving.",),
}
GAUGES = {
    "spec_speedup_ratio": ("Estimated speed-up over gamma 0, last 512 steps.",),
    "draft_agreement": ("Share of a draft's tokens that were the target's at start.", "drafter"),
    "drafter_acceptance_recent": (
        "Share of first drafts accepted, over about 2,000 draft tokens.",
        "drafter",
    ),
    "drafter_acceptance_past": (
        "The same over 200,000 draft tokens or a day of work, whichever is more.",
        "drafter",
    ),
    "requests_running": ("Requests in the batch.",),
    "requests_waiting": ("Requests in the queue.",),
    "kv_blocks": ("KV blocks by state.", "state"),
    "state_slots": ("Slots for states of layers by what they hold.", "state"),
    "kv_offload_blocks": ("Blocks that are kept outside of the KV store.",),
    "kv_offload_bytes": ("Bytes of these.",),
    "kv_blocks_total": ("KV blocks in the pool.",),
    "kv_block_size": ("Tokens in a KV block.",),
    "lora_adapters": ("Adapters that are loaded.",),
    "engine_up": ("1 while the engine lives.",),
    "draining": ("1 while open requests finish and no new ones are taken.",),
    "gpu_memory_bytes": ("Device memory.", "kind"),
}
# Only of models whose layers keep a state.
OF_STATES = {"state_hits", "state_slots"}
# Buckets, what it shows, labels.
HISTOGRAMS: dict[str, tuple[Any, ...]] = {
    "spec_request_acceptance_rate": (
        _RATE,
        "Accepted over verified draft tokens, per request.",
        "drafter",
    ),
    "spec_request_speedup": (_SPEEDUP, "Estimated speed-up over gamma 0, per request.", "drafter"),
    "time_to_first_token_seconds": (_LATENCY, "From arrival to the first token."),
    "time_per_output_token_seconds": (_PER_TOKEN, "Per request: mean after the first token."),
    "e2e_seconds": (_LATENCY, "From arrival to the last token."),
    "queue_seconds": (_LATENCY, "From arrival into the batch."),
    "request_inference_seconds": (_LATENCY, "From the batch to the last token."),
    "request_prefill_seconds": (_LATENCY, "From the batch to the first token."),
    "request_decode_seconds": (_LATENCY, "From the first token to the last."),
    "request_prompt_tokens": (_TOKENS, "Prompt tokens per choice."),
    "request_generation_tokens": (_TOKENS, "Tokens returned per choice."),
}
# A rate sees a first event only if the series was there before it; alerts watch these.
SHOWN_AS_ZERO = {
    "requests": ("stop", "length", "abort", "error", "deadline", "rejected"),
    "rejections": ("queue_full",),
    "connections_cut_off": ("read", "write"),
}
