"""The dashboard *Speculation*: what drafting earns, what it costs, and why it was cut."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from deploy.dashboards.panels import (
    DRAFTING,
    HERE,
    bars,
    choice,
    heat,
    lines,
    new_dashboard,
    number,
    quantile,
    share_of,
    total,
)

_SPEC = "slipstream_spec"
_BASELINE = total("slipstream_baseline_seconds_total")
_DECODE = total("slipstream_decode_seconds_total")
_PART = "slipstream_step_seconds_total"
_LATE = f"slipstream_drafter_acceptance_recent{{{DRAFTING}}}"
_PAST = f"slipstream_drafter_acceptance_past{{{DRAFTING}}}"


def _spec(name: str, by: str = "") -> str:
    return total(f"{_SPEC}_{name}_total", by, DRAFTING)


def _by_drafter(*names: str) -> list[str]:
    return [_spec(name, "drafter") for name in names]


def speculation() -> Dashboard:
    dashboard = new_dashboard(
        "slipstream-speculation",
        "Slipstream / Speculation",
        "What drafting earns, what it costs, and why drafts were cut.",
    ).with_variable(
        choice(
            "drafter",
            "Drafter",
            f"label_values({_SPEC}_steps_total{{{HERE}}}, drafter)",
        )
    )
    for add in (_now, _earned, _granted, _spent):
        add(dashboard)
    return dashboard


def _now(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Now"))
    drafted, accepted = _spec("draft_tokens"), _spec("accepted_tokens")
    steps, emitted = _spec("steps"), _spec("emitted_tokens")
    rows = total("slipstream_rows_total")
    drafting = total(_PART, selector=f'{HERE}, part="draft"')
    for panel in (
        number(
            "Speed-up over gamma 0",
            "Estimated time of the same tokens without drafts, over the time taken. Below 1, drafting "
            "costs more than it gains. Counts all drafters.",
            "x",
            f"{_BASELINE} / {_DECODE}",
            floor=1,
        ),
        number(
            "Tokens per step",
            "Tokens a request gets from one forward of the model; 1 is plain decoding.",
            "none",
            f"{emitted} / {steps}",
        ),
        number(
            "Acceptance",
            "Share of the verified draft tokens that the model would have written itself.",
            "percentunit",
            share_of(accepted, drafted),
        ),
        number(
            "Gamma",
            "Draft tokens granted per request and step, on average; 0 counts too.",
            "none",
            f"{total(f'{_SPEC}_gamma_sum', selector=DRAFTING)}"
            f" / {total(f'{_SPEC}_gamma_count', selector=DRAFTING)}",
        ),
        number(
            "Wasted rows",
            "Share of all rows of the model's forward that held drafts which were rejected.",
            "percentunit",
            share_of(f"({drafted} - {accepted})", rows),
        ),
        number(
            "Time spent drafting",
            "Share of the engine's step time that drafters take. Counts all drafters.",
            "percentunit",
            share_of(drafting, total(_PART)),
        ),
    ):
        dashboard.with_panel(panel)


def _earned(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("What drafts earn"))
    # Two digits, so that positions sort by number.
    at = _spec("accepted_tokens_per_position", "position")
    padded = f'label_replace({at}, "position", "0$1", "position", "(.)")'
    for panel in (
        lines(
            "Speed-up over gamma 0",
            "Estimated time of the same tokens without drafts, over the time taken. Below the "
            "line at 1, drafting costs more than it gains. Counts all drafters.",
            "x",
            [(f"{_BASELINE} / {_DECODE}", "all requests")],
            floor=1,
        ),
        lines(
            "Speed-up of requests by drafter",
            "Half of the requests that ended gained more than this, by the drafter they named.",
            "x",
            [
                (
                    quantile(0.5, f"{_SPEC}_request_speedup", "drafter", DRAFTING),
                    "{{drafter}}",
                )
            ],
            floor=1,
        ),
        lines(
            "Tokens per step by drafter",
            "Tokens a request gets from one forward of the model; 1 is plain decoding. Steps "
            "without a draft count too.",
            "none",
            [(" / ".join(_by_drafter("emitted_tokens", "steps")), "{{drafter}}")],
        ),
        lines(
            "Acceptance by drafter",
            "Share of the verified draft tokens that were accepted. A drafter may accept little and "
            "still gain, if rows are cheap: read it beside the speed-up.",
            "percentunit",
            [(share_of(*_by_drafter("accepted_tokens", "draft_tokens")), "{{drafter}}")],
            top=1,
        ),
        lines(
            "Acceptance of late against its past",
            "Share of first drafts accepted of late, over the same in the drafter's own past; of "
            "several instances the one that fell most. Below the line at 0.7 the traffic has "
            "changed, or a draft no longer fits its model.",
            "percentunit",
            [(f"min by (drafter) ({_LATE} / {_PAST})", "{{drafter}}")],
            floor=0.7,
        ),
        bars(
            "Accepted per position",
            "How often the draft at each depth (0 is the first) was accepted, per decoding step. "
            "Where the bars end, deeper drafts are wasted.",
            "percentunit",
            (
                share_of(padded, f"ignoring (position) group_left () {_spec('steps')}"),
                "{{position}}",
            ),
        ),
        heat(
            "Acceptance of requests",
            "How many requests ended with which acceptance. Two bands mean two kinds of work.",
            "percentunit",
            f"{_SPEC}_request_acceptance_rate",
            DRAFTING,
        ),
    ):
        dashboard.with_panel(panel)


def _granted(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("What is granted, and what is cut"))
    for panel in (
        heat(
            "Gamma",
            "How many draft tokens were granted per request and step. All at 0 under load is right: "
            "rows are dear then.",
            "none",
            f"{_SPEC}_gamma",
            DRAFTING,
        ),
        lines(
            "Drafts cut to nothing, by reason",
            "no_match: the drafter found nothing. low_acceptance: not worth a row. overload: rows "
            "were needed elsewhere. no_kv: no block was free. client_cap: the request's own bound. "
            "policy: the gamma policy said 0. shed: drafts yielded to requests that wait.",
            "cps",
            [(_spec("disabled", "reason"), "{{reason}}")],
            stacked=True,
        ),
        lines(
            "Drafts cut to nothing, by drafter",
            "The same by drafter: which one is seldom heard.",
            "cps",
            [(_spec("disabled", "drafter"), "{{drafter}}")],
            stacked=True,
        ),
    ):
        dashboard.with_panel(panel)


def _spent(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("What drafts cost"))
    drafted, accepted = _spec("draft_tokens", "drafter"), _spec("accepted_tokens", "drafter")
    steps, emitted = total("slipstream_steps_total"), _spec("emitted_tokens", "drafter")
    for panel in (
        lines(
            "Wasted rows by drafter",
            "Rows of the model's forward per second that held drafts which were rejected.",
            "cps",
            [(f"{drafted} - {accepted}", "{{drafter}}")],
            stacked=True,
        ),
        lines(
            "Time of a step by part",
            "Where the engine's mean step goes: drafting, the model's forward, verification, the "
            "rest. Steps with prompts are longer. Counts all drafters.",
            "s",
            [(f"{total(_PART, 'part')} / ignoring (part) group_left () {steps}", "{{part}}")],
            stacked=True,
        ),
        lines(
            "Draft and verify time by drafter",
            "Requests' share of drafting and of forward and verification, per token they got. "
            "Counted when a request ends, so it moves late on long answers.",
            "s",
            [
                (f"{_spec('draft_seconds', 'drafter')} / {emitted}", "draft, {{drafter}}"),
                (f"{_spec('verify_seconds', 'drafter')} / {emitted}", "verify, {{drafter}}"),
            ],
        ),
        lines(
            "Failed drafts",
            "Drafts lost to an error in a drafter. The text is not affected; the log has the error.",
            "cps",
            [(total(f"{_SPEC}_draft_failures_total"), "failures")],
        ),
    ):
        dashboard.with_panel(panel.span(6))
