"""The dashboard *Fleet*: what each replica does, whether requests find their caches, whose they are.

A replica is an instance, or, where an ingress under Ray Serve shows those behind it, a label of its own.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from deploy.dashboards.panels import (
    HERE,
    choice,
    folded,
    lines,
    new_dashboard,
    number,
    quantile,
    share_of,
    total,
)

_TENANT = f'{HERE}, tenant=~"$tenant"'
_WRITTEN = "slipstream_generation_tokens_total"
_HITS, _QUERIES = "slipstream_prefix_cache_hits_total", "slipstream_prefix_cache_queries_total"
_TENANT_TOKENS = "slipstream_tenant_tokens_total"
_ROUTED = "slipstream_gateway_requests_total"
_REPLICA = "instance, replica"
# A replica that Serve ends tells nobody: the ingresses see what is open there.
_LEAVING = f"max by ({_REPLICA}) (slipstream_gateway_replica_leaving{{{HERE}}})"


def _now_at(gauge: str, by: str = "", selector: str = HERE) -> str:
    """A gauge as it stands, summed over what ``by`` does not name."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} ({gauge}{{{selector}}})"


def _each(expr: str) -> list[tuple[str, str]]:
    return [(expr, "{{instance}} {{replica}}")]


def fleet() -> Dashboard:
    dashboard = new_dashboard(
        "slipstream-fleet",
        "Slipstream / Fleet",
        "What each replica does, whether requests go where their prompts are cached, and whose they are.",
    ).with_variable(choice("tenant", "Tenant", f"label_values({_TENANT_TOKENS}{{{HERE}}}, tenant)"))
    for add in (_now, _replicas, _affinity, _drain, _gateway, _tenants):
        add(dashboard)
    return dashboard


def _now(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Now"))
    running = f"slipstream_requests_running{{{HERE}}}"
    for panel in (
        number(
            "Replicas that serve",
            "Whose engine lives and that take requests.",
            "none",
            f"{_now_at('slipstream_engine_up')} - {_now_at('slipstream_draining')}",
            floor=1,
        ),
        number(
            "Draining",
            "Replicas that finish what they have and take nothing new.",
            "none",
            f"({_now_at('slipstream_draining')} or vector(0)) + (sum ({_LEAVING}) or vector(0))",
        ),
        number(
            "Waiting",
            "Requests in all queues together: what the autoscaler goes by.",
            "none",
            _now_at("slipstream_requests_waiting"),
        ),
        number(
            "Uneven load",
            "Requests in the batch of the busiest replica, less those of the idlest. Affinity is paid "
            "for by this.",
            "none",
            f"max ({running}) - min ({running})",
        ),
        number("Tokens written", "Per second, of all replicas.", "cps", total(_WRITTEN)),
        number(
            "Affinity hits",
            "Share of the prompt tokens that were found in the prefix cache of the replica that got "
            "them. Falls where requests are spread blindly.",
            "percentunit",
            share_of(total(_HITS), total(_QUERIES)),
        ),
    ):
        dashboard.with_panel(panel)


def _replicas(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("By replica"))
    held = _now_at("slipstream_kv_blocks", _REPLICA, f'{HERE}, state=~"committed|draft"')
    baseline, decode = (
        total(f"slipstream_{each}_seconds_total", _REPLICA) for each in ("baseline", "decode")
    )
    for panel in (
        lines(
            "Requests in the batch, by replica",
            "What each replica works on.",
            "none",
            _each(_now_at("slipstream_requests_running", _REPLICA)),
            stacked=True,
        ),
        lines(
            "Requests waiting, by replica",
            "A queue at one replica while another has none: requests stick to the wrong places.",
            "none",
            _each(_now_at("slipstream_requests_waiting", _REPLICA)),
            stacked=True,
        ),
        lines(
            "Tokens written, by replica",
            "Per second.",
            "cps",
            _each(total(_WRITTEN, _REPLICA)),
            stacked=True,
        ),
        lines(
            "Time to first token, by replica",
            "95 of 100 requests waited no longer.",
            "s",
            _each(quantile(0.95, "slipstream_time_to_first_token_seconds", _REPLICA)),
        ),
        lines(
            "KV blocks held, by replica",
            "Share of a replica's blocks that requests hold; cached ones do not count.",
            "percentunit",
            _each(f"{held} / {_now_at('slipstream_kv_blocks_total', _REPLICA)}"),
            top=1,
        ),
        lines(
            "Speed-up over gamma 0, by replica",
            "A fresh replica has learnt nothing yet, and drafts worse.",
            "x",
            _each(f"{baseline} / {decode}"),
            floor=1,
        ),
    ):
        dashboard.with_panel(panel)


def _affinity(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Affinity"))
    for panel in (
        lines(
            "Affinity hits, by replica",
            "Share of the prompt tokens that each replica found in its prefix cache.",
            "percentunit",
            _each(share_of(total(_HITS, _REPLICA), total(_QUERIES, _REPLICA))),
            top=1,
        ),
        lines(
            "Prompt tokens computed and found",
            "Per second: what affinity saves, and what is left to do.",
            "cps",
            [(total("slipstream_prompt_tokens_total"), "computed"), (total(_HITS), "found")],
            stacked=True,
        ),
        lines(
            "KV events",
            "Per second: told to routers that follow the caches, and lost since too many waited. Who "
            "lost some routes by an old picture until it asks again.",
            "cps",
            [
                (total("slipstream_kv_events_total"), "sent"),
                (total("slipstream_kv_events_dropped_total"), "dropped"),
            ],
        ),
    ):
        dashboard.with_panel(panel)


def _gateway(dashboard: Dashboard) -> None:
    """Adds the figures that only the ingress knows."""
    at_replica = _now_at("slipstream_gateway_requests_open", _REPLICA)
    keyed = f'{HERE}, route=~"home|spilled"'
    panels = (
        lines(
            "Requests at home",
            "Share of the requests with a key that went to the replica that the key belongs to. The rest "
            "was sent on, since that one was busier than the others.",
            "percentunit",
            [
                (
                    share_of(
                        total(_ROUTED, selector=f'{HERE}, route="home"'),
                        total(_ROUTED, selector=keyed),
                    ),
                    "at home",
                )
            ],
            top=1,
        ),
        lines(
            "Where requests go",
            "Per second: to the replica that has their key, to another one, or, where there is no key, "
            "to the idlest.",
            "reqps",
            [(total(_ROUTED, "route"), "{{route}}")],
            stacked=True,
        ),
        lines(
            "Redone and lost",
            "Per second: requests that another replica did after theirs was gone, streams that were cut "
            "short, and what the ingress itself answered with an error.",
            "reqps",
            [
                (total("slipstream_gateway_requests_redone_total"), "redone"),
                (total("slipstream_gateway_streams_lost_total"), "streams cut short"),
                (total("slipstream_gateway_errors_total", "code"), "{{code}}"),
            ],
        ),
        lines(
            "Requests open, by replica",
            "As all ingresses together see it.",
            "none",
            [(_now_at("slipstream_gateway_requests_open", "replica"), "{{replica}}")],
            stacked=True,
        ),
        lines(
            "Requests waiting before the replicas",
            "All replicas are full, or none has started yet.",
            "none",
            [(_now_at("slipstream_gateway_requests_waiting", "ingress"), "{{ingress}}")],
            stacked=True,
        ),
        lines(
            "Time until a replica takes a request",
            "95 of 100 requests waited no longer before a replica's own queue.",
            "s",
            [(quantile(0.95, "slipstream_gateway_queue_seconds", "ingress"), "{{ingress}}")],
        ),
        lines(
            "Replicas that Serve ends, and what they have left",
            "1 while a replica leaves, and the requests that are open there meanwhile.",
            "none",
            [
                (_LEAVING, "{{replica}} leaves"),
                (f"{at_replica} * {_LEAVING}", "open at {{replica}}"),
            ],
        ),
    )
    dashboard.with_row(folded("Ingress under Ray Serve", "an ingress of deploy/ray", *panels))


def _tenants(dashboard: Dashboard) -> None:
    panels = (
        lines(
            "Tokens, by tenant",
            "Prompts and outputs of choices that were done, per second.",
            "cps",
            [(total(_TENANT_TOKENS, "tenant, kind", _TENANT), "{{tenant}}, {{kind}}")],
            stacked=True,
        ),
        lines(
            "Where tenants are served",
            "Output tokens per second by tenant and replica: with affinity a tenant stays in few places.",
            "cps",
            [
                (
                    total(
                        _TENANT_TOKENS,
                        f"tenant, {_REPLICA}",
                        f'{HERE}, kind="written", tenant=~"$tenant"',
                    ),
                    "{{tenant}} at {{instance}} {{replica}}",
                )
            ],
            stacked=True,
        ),
        lines(
            "Turned away, by tenant",
            "By the code of the limit, or queue_full.",
            "reqps",
            [
                (
                    total("slipstream_tenant_rejections_total", "tenant, reason", _TENANT),
                    "{{tenant}}: {{reason}}",
                )
            ],
            stacked=True,
        ),
    )
    dashboard.with_row(folded("By tenant", "a file of keys (--api-keys-file)", *panels))


def _drain(dashboard: Dashboard) -> None:
    dashboard.with_row(Row("Drain"))
    draining = _now_at("slipstream_draining", _REPLICA)
    running = _now_at("slipstream_requests_running", _REPLICA)
    for panel in (
        lines(
            "Draining, by replica",
            "1 from the signal to end until the last byte.",
            "none",
            _each(draining),
            stacked=True,
        ),
        lines(
            "Requests left at replicas that drain",
            "What is open there; it has drain_seconds to finish.",
            "none",
            _each(f"{running} * {draining}"),
            stacked=True,
        ),
        lines(
            "Choices cut short, by replica",
            "Ended as abort or error, per second. When replicas go, this should stay where it is.",
            "cps",
            _each(
                total(
                    "slipstream_requests_total",
                    _REPLICA,
                    f'{HERE}, finish_reason=~"abort|error"',
                )
            ),
        ),
    ):
        dashboard.with_panel(panel)
