"""The dashboard *Serving*: how fast answers come, how much is served, what is in the way."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from deploy.dashboards.panels import (
    HERE,
    folded,
    heat,
    lines,
    new_dashboard,
    number,
    quantile,
    quantiles,
    rate,
    share_of,
    total,
)

_TTFT = "slipstream_time_to_first_token_seconds"
_PER_TOKEN = "slipstream_time_per_output_token_seconds"
_QUERIES = total("slipstream_prefix_cache_queries_total")
_HITS = total("slipstream_prefix_cache_hits_total")
_API = f'{HERE}, path=~"/v1/.*"'
# Before the first such answer there is no series; then there were none.
_FAILED = total("slipstream_http_requests_total", selector=f'{_API}, status=~"5.."')


def _blocks(states: str) -> str:
    return f'sum (slipstream_kv_blocks{{{HERE}, state=~"{states}"}})'


_BLOCKS_HELD = f"{_blocks('committed|draft')} / sum (slipstream_kv_blocks_total{{{HERE}}})"


def serving() -> Dashboard:
    dashboard = new_dashboard(
        "slipstream-serving",
        "Slipstream / Serving",
        "How fast answers come, how much is served, and what is in the way.",
    )
    for add in (_now, _latency, _work, _memory, _trouble, _device, _states):
        add(dashboard)
    return dashboard


def _now(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Now"))
    for panel in (
        number(
            "Engines up",
            "Share of the servers whose engine lives. A dead engine serves nothing until the "
            "server is restarted.",
            "percentunit",
            f"avg (slipstream_engine_up{{{HERE}}})",
            floor=1,
        ),
        number(
            "Time to first token",
            "95 of 100 requests got their first token within this time of arriving.",
            "s",
            quantile(0.95, _TTFT),
        ),
        number(
            "Time per output token",
            "Half of the requests got each further token in this time or less.",
            "s",
            quantile(0.5, _PER_TOKEN),
        ),
        number(
            "Tokens written",
            "Tokens emitted per second over all requests.",
            "cps",
            total("slipstream_generation_tokens_total"),
        ),
        number(
            "Waiting",
            "Requests in the queue now.",
            "none",
            f"sum (slipstream_requests_waiting{{{HERE}}})",
        ),
        number(
            "KV blocks held",
            "Share of the KV blocks that requests hold. Cached ones do not count: they are given up "
            "when needed.",
            "percentunit",
            _BLOCKS_HELD,
        ),
    ):
        dashboard.with_panel(panel)


def _latency(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("How long clients wait"))
    for panel in (
        lines(
            "Time to first token",
            "From a request's arrival to its first token: queue and prompt together.",
            "s",
            quantiles(_TTFT),
        ),
        lines(
            "Time per output token",
            "Mean time between tokens after the first, per request.",
            "s",
            quantiles(_PER_TOKEN),
        ),
        lines(
            "Whole request",
            "From arrival to the last token.",
            "s",
            quantiles("slipstream_e2e_seconds"),
        ),
        lines(
            "Time in the queue",
            "From arrival into the batch. If this grows, the server is full.",
            "s",
            quantiles("slipstream_queue_seconds"),
        ),
        lines(
            "Requests running and waiting",
            "In the batch, and in the queue.",
            "none",
            [
                (f"sum (slipstream_requests_running{{{HERE}}})", "running"),
                (f"sum (slipstream_requests_waiting{{{HERE}}})", "waiting"),
            ],
        ),
        heat(
            "Time to first token, all requests",
            "How many requests waited how long for their first token.",
            "s",
            _TTFT,
            HERE,
        ),
    ):
        dashboard.with_panel(panel)


def _work(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("How much is served"))
    steps = total("slipstream_steps_total")
    for panel in (
        lines(
            "Throughput",
            "Tokens per second: prompt tokens computed, prompt tokens taken from the cache, and "
            "tokens written.",
            "cps",
            [
                (total("slipstream_prompt_tokens_total"), "prompt, computed"),
                (_HITS, "prompt, cached"),
                (total("slipstream_generation_tokens_total"), "written"),
            ],
        ),
        lines(
            "Requests by how they ended",
            "stop: the model or a stop string ended it. length: as long as was allowed. abort: the "
            "client left. error: it failed. rejected: it was not taken.",
            "reqps",
            [(total("slipstream_requests_total", "finish_reason"), "{{finish_reason}}")],
            stacked=True,
        ),
        lines(
            "Rows per step",
            "Tokens in one forward of the model, on average: prompt chunks, anchors and drafts.",
            "none",
            [(f"{total('slipstream_rows_total')} / {steps}", "rows")],
        ),
        lines(
            "Length of prompts",
            "Tokens per prompt.",
            "none",
            quantiles("slipstream_request_prompt_tokens"),
        ),
        lines(
            "Length of answers",
            "Tokens returned per choice.",
            "none",
            quantiles("slipstream_request_generation_tokens"),
        ),
        lines(
            "Steps",
            "Forwards of the model per second.",
            "cps",
            [(steps, "steps")],
        ),
    ):
        dashboard.with_panel(panel)


def _memory(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Memory"))
    resident = f"sum by (instance) (process_resident_memory_bytes{{{HERE}}})"
    for panel in (
        lines(
            "KV blocks by state",
            "committed: held for final tokens. draft: leased to drafts. cached: kept in case a prompt "
            "begins alike. free: holding nothing.",
            "none",
            [(f"sum by (state) (slipstream_kv_blocks{{{HERE}}})", "{{state}}")],
            stacked=True,
        ),
        lines(
            "Prefix-cache hits",
            "Share of looked-up prompt tokens whose keys and values were still there.",
            "percentunit",
            [(share_of(_HITS, _QUERIES), "hits")],
            top=1,
        ),
        lines(
            "Preemptions",
            "Requests per second that lost their KV blocks to others and have to be recomputed. Many "
            "of them mean too few blocks for so many requests.",
            "reqps",
            [(total("slipstream_preemptions_total"), "preemptions")],
        ),
        lines(
            "Memory of the process",
            "Resident memory of the server's own process. The engine's, with model and KV blocks, is "
            "another, which is not in it.",
            "bytes",
            [(resident, "{{instance}}")],
        ),
        lines(
            "CPU of the process",
            "Cores in use by the server's own process, without the engine's.",
            "none",
            [(f"sum by (instance) ({rate('process_cpu_seconds_total')})", "{{instance}}")],
        ),
    ):
        dashboard.with_panel(panel)


def _trouble(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Trouble"))
    answers = total("slipstream_http_requests_total", selector=_API)
    failed = total("slipstream_requests_total", selector=f'{HERE}, finish_reason="error"')
    full = total("slipstream_rejections_total", selector=f'{HERE}, reason="queue_full"')
    for panel in (
        lines(
            "Answers by status",
            "Of the API, not of probes. 429: the queue was full. 4xx: the request could not be served. "
            "5xx: the server failed.",
            "reqps",
            [(total("slipstream_http_requests_total", "status", _API), "{{status}}")],
            stacked=True,
        ),
        lines(
            "Errors",
            "Share of answers with a status of 5xx, and of choices that failed, some after their "
            "stream had begun.",
            "percentunit",
            [
                (share_of(f"({_FAILED} or vector(0))", answers), "answers"),
                (share_of(failed, total("slipstream_requests_total")), "choices"),
            ],
        ),
        lines(
            "Rejections by reason",
            "Requests turned away, by the error's code.",
            "reqps",
            [(total("slipstream_rejections_total", "reason"), "{{reason}}")],
            stacked=True,
        ),
        lines(
            "Turned away at a full queue",
            "Answers with status 429 per second. Clients are told when to come again.",
            "reqps",
            [(full, "429")],
        ),
    ):
        dashboard.with_panel(panel.span(6))


def _device(dashboard: Dashboard) -> None:
    panel = lines(
        "Memory of the device",
        "Memory of the GPUs, by kind.",
        "bytes",
        [(f"sum by (kind) (slipstream_gpu_memory_bytes{{{HERE}}})", "{{kind}}")],
    )
    dashboard.with_row(folded("GPU", "a server on a CUDA device", panel))


def _states(dashboard: Dashboard) -> None:
    panel = lines(
        "State slots by what they hold",
        "seat: a running request's. snapshot: kept for prompts that begin alike.",
        "none",
        [(f"sum by (state) (slipstream_state_slots{{{HERE}}})", "{{state}}")],
        stacked=True,
    )
    dashboard.with_row(folded("Recurrent layers", "a model whose layers keep a state", panel))
