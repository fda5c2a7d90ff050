"""The parts all dashboards are made of: variables, queries and the kinds of panel.

Metrics carry no model's name; ``slipstream_model_info`` says which instance serves which model. So
the variable ``model`` narrows ``instance``, and every query selects by ``instance``.
"""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import bargauge, common, heatmap, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery as AnyQuery
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.common import (
    AxisPlacement,
    BarGaugeDisplayMode,
    BigValueGraphMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
HERE = 'instance=~"$instance"'
DRAFTING = f'{HERE}, drafter=~"$drafter"'
TAG = "slipstream"

Query = tuple[str, str]
"""An expression and its legend."""


def rate(metric: str, selector: str = HERE) -> str:
    return f"rate({metric}{{{selector}}}[$__rate_interval])"


def total(metric: str, by: str = "", selector: str = HERE) -> str:
    """Growth per second, summed over instances and all labels that ``by`` does not name."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} ({rate(metric, selector)})"


def share_of(part: str, whole: str) -> str:
    """``part`` of ``whole``, from 0 to 1. Prometheus extrapolates each counter's growth by itself: a part
    may seem to have grown faster than its whole while a window holds few scrapes."""
    return f"clamp({part} / {whole}, 0, 1)"


def quantile(share: float, histogram: str, by: str = "", selector: str = HERE) -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {total(f'{histogram}_bucket', labels, selector)})"


def quantiles(histogram: str) -> list[Query]:
    return [
        (quantile(share, histogram), name)
        for share, name in ((0.5, "half"), (0.95, "95 %"), (0.99, "99 %"))
    ]


def new_dashboard(uid: str, title: str, description: str) -> board.Dashboard:
    """A dashboard with data source, model and instance to choose, and links to its siblings."""
    links = (
        board.DashboardLink("Slipstream dashboards")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(False)
        .include_vars(True)
        .keep_time(True)
    )
    return (
        board.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .readonly()
        .refresh("10s")
        .time("now-30m", "now")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(links)
        .with_variable(
            board.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .with_variable(choice("model", "Model", "label_values(slipstream_model_info, model_name)"))
        .with_variable(
            choice(
                "instance",
                "Instance",
                'label_values(slipstream_model_info{model_name=~"$model"}, instance)',
            )
        )
    )


def choice(name: str, label: str, query: str) -> board.QueryVariable:
    """A variable with any number of values, all of them at first."""
    everything = model.VariableOption(selected=True, text="All", value="$__all")
    return (
        board.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .current(everything)
        .multi(True)
        .include_all(True)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )


def _targets(queries: Sequence[Query]) -> list[Builder[AnyQuery]]:
    return [
        Dataquery().ref_id(chr(ord("A") + index)).expr(expr).legend_format(legend).range()
        for index, (expr, legend) in enumerate(queries)
    ]


def _steps(*levels: tuple[float | None, str]) -> board.ThresholdsConfig:
    steps = [model.Threshold(value=value, color=color) for value, color in levels]
    return board.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def folded(title: str, needs: str, *panels: Builder[model.Panel]) -> board.Row:
    """A row that is closed until somebody opens it: servers without what it ``needs`` have no data for
    its panels, and its title says so."""
    row = board.Row(f"{title}: needs {needs}").collapsed(True)
    for panel in panels:
        row.with_panel(panel)
    return row


def number(
    title: str, description: str, unit: str, expr: str, floor: float | None = None
) -> stat.Panel:
    """One value with its recent course; below ``floor`` it is red."""
    levels: tuple[tuple[float | None, str], ...] = ((None, "green"),)
    if floor is not None:
        levels = ((None, "red"), (floor, "green"))
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .targets(_targets([(expr, "")]))
        .graph_mode(BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_steps(*levels))
        .no_value("no data yet")
        .span(4)
        .height(4)
    )


def lines(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    stacked: bool = False,
    floor: float | None = None,
    top: float | None = None,
) -> timeseries.Panel:
    """Courses over time; ``floor`` draws a line below which is red, ``top`` ends the axis."""
    legend = (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.TABLE)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["mean", "lastNotNull"])
    )
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .targets(_targets(queries))
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .line_width(1)
        .fill_opacity(30 if stacked else 5)
        .span(8)
        .height(8)
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    if top is not None:
        panel.max(top)
    if floor is not None:
        panel.thresholds(_steps((None, "red"), (floor, "transparent")))
        style = common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
        panel.thresholds_style(style)
    return panel


def bars(title: str, description: str, unit: str, query: Query) -> bargauge.Panel:
    """The newest value of each series, in the order of their labels."""
    return (
        bargauge.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .targets(_targets([query]))
        .orientation(VizOrientation.HORIZONTAL)
        .display_mode(BarGaugeDisplayMode.BASIC)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_steps((None, "green")))
        .no_value("no data yet")
        .span(8)
        .height(8)
    )


def heat(title: str, description: str, unit: str, histogram: str, selector: str) -> heatmap.Panel:
    """How often each bucket of ``histogram`` was hit over time; ``unit`` is of the buckets."""
    expr = f"sum by (le) (increase({histogram}_bucket{{{selector}}}[$__rate_interval]))"
    target: Builder[AnyQuery] = (
        Dataquery()
        .ref_id("A")
        .expr(expr)
        .legend_format("{{le}}")
        .format(PromQueryFormat.HEATMAP)
        .range()
    )
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .targets([target])
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
        )
        .y_axis(heatmap.YAxisConfig().axis_placement(AxisPlacement.LEFT).unit(unit))
        .unit(unit)
        .span(8)
        .height(8)
    )
