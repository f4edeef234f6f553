"""The same measurements as pictures: PNG files beside results.json."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import report

COLORS = {"ours": "#d95f02", "eager": "#7570b3", "compile": "#1b9e77", "triton": "#e7298a", "F.relu": "#a6a3cf"}
LABELS = {"eager": "stock eager", "compile": "torch.compile", "triton": "Triton"}


def draw(results: dict, folder: Path) -> int:
    """Draws what the records suffice for, and returns how many files that were."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plots: they need matplotlib", file=sys.stderr)
        return 0
    records = results["records"]
    where = results["environment"]["gpu"] or results["environment"]["cpu"]
    figures = {}
    for form in dict.fromkeys(record["form"] for record in records if record["group"] == "sizes"):
        figures[f"bandwidth-{form}"] = _bandwidth(Figure, form, records)
    for group in ("layouts", "gradients", "channels"):
        figures[group] = _bars(Figure, [record for record in records if record["group"] == group])
    figures["host"] = _host(Figure, records)
    figures["saved"] = _saved(Figure, records)
    figures = {name: figure for name, figure in figures.items() if figure}
    for name, figure in figures.items():
        figure.suptitle(f"{figure.get_suptitle()}\n{where}, torch {results['environment']['torch']}", fontsize=10)
        figure.savefig(folder / f"{name}.png", dpi=120)
    return len(figures)


def _gb_per_s(record: dict, peer: str) -> float:
    return record["bytes"] / record["us"][peer] / 1e3


def _distinct(records: list[dict], key: str) -> list:
    return list(dict.fromkeys(record[key] for record in records))


def _bandwidth(Figure, form: str, records: list[dict]):
    """Bandwidth against size: a column for each dtype, a row for each direction."""
    records = [r for r in records if r["group"] == "sizes" and r["form"] == form and r["direction"] != "step"]
    dtypes, directions = _distinct(records, "dtype"), _distinct(records, "direction")
    if not records:
        return None
    figure = Figure(figsize=(3.6 * len(dtypes) + 1, 2.8 * len(directions) + 0.8), layout="constrained")
    axes = figure.subplots(len(directions), len(dtypes), squeeze=False, sharey=True, sharex=True)
    for row, direction in zip(axes, directions, strict=True):
        for ax, dtype in zip(row, dtypes, strict=True):
            here = [r for r in records if r["direction"] == direction and r["dtype"] == dtype]
            here.sort(key=lambda r: r["shape"])
            for peer in ("ceiling", "eager", "triton", "compile", "ours"):
                points = [(math.prod(r["shape"]), _gb_per_s(r, peer)) for r in here if peer in r["us"]]
                if points:
                    dashed = {"linestyle": "--", "color": "black", "linewidth": 1}
                    solid = {"marker": "o", "markersize": 3.5, "color": COLORS.get(peer)}
                    style = dashed if peer == "ceiling" else solid
                    label = "best plain copy" if peer == "ceiling" else LABELS.get(peer, "my_cuda_op")
                    ax.plot(*zip(*points, strict=True), label=label, **style)
            ax.set_title(f"{direction}, {dtype}", fontsize=9)
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.grid(alpha=0.3)
        row[0].set_ylabel("GB/s")
    for ax in axes[-1]:
        ax.set_xlabel("elements")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(form)
    return figure


def _grouped(ax, groups: list[str], values: dict[str, list[float | None]], fmt: Callable[[float], str]) -> None:
    """Bars side by side for each group, one of each peer."""
    width = 0.8 / max(1, len(values))
    for i, (peer, heights) in enumerate(values.items()):
        at = [g + (i - (len(values) - 1) / 2) * width for g in range(len(groups))]
        label = LABELS.get(peer, "my_cuda_op" if peer == "ours" else peer)
        bars = ax.bar(at, [h or 0 for h in heights], width, label=label, color=COLORS[peer])
        ax.bar_label(bars, [fmt(h) if h is not None else "" for h in heights], fontsize=6, rotation=90, padding=2)
    ax.set_xticks(range(len(groups)), groups, rotation=25, ha="right", fontsize=8)
    ax.margins(y=0.2)
    ax.grid(axis="y", alpha=0.3)


def _bars(Figure, records: list[dict]):
    """Bandwidth by layout, with a mark at each ceiling: a panel for each dtype and direction."""
    panels = list(dict.fromkeys((r["dtype"], r["direction"]) for r in records))
    if not records:
        return None
    figure = Figure(figsize=(10, 3 * len(panels) + 0.6), layout="constrained")
    for ax, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        here = [r for r in records if (r["dtype"], r["direction"]) == panel]
        many = len(_distinct(here, "form")) > 1
        groups = [f"{r['form']}\n{r['layout']}" if many else r["layout"] for r in here]
        peers = [peer for peer in ("ours", "eager", "compile") if any(peer in r["us"] for r in here)]
        values = {peer: [_gb_per_s(r, peer) if peer in r["us"] else None for r in here] for peer in peers}
        _grouped(ax, groups, values, report.number)
        ceilings = [_gb_per_s(r, "ceiling") for r in here]
        ax.hlines(
            ceilings,
            [g - 0.42 for g in range(len(here))],
            [g + 0.42 for g in range(len(here))],
            "black",
            "dashed",
            linewidth=1,
            label="best plain copy",
        )
        title = f"{panel[1]}, {panel[0]}" if many else f"{here[0]['form']}, {panel[1]}, {panel[0]}"
        ax.set_title(title, fontsize=9)
        ax.set_ylabel("GB/s")
        ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(report.GROUPS[records[0]["group"]])
    return figure


def _host(Figure, records: list[dict]):
    records = [r for r in records if r["group"] == "host"]
    if not records:
        return None
    devices = _distinct(records, "layout")
    figure = Figure(figsize=(5 * len(devices), 3.6), layout="constrained")
    for ax, device in zip(figure.subplots(1, len(devices), squeeze=False)[0], devices, strict=True):
        here = [r for r in records if r["layout"] == device]
        peers = [peer for peer in ("ours", "eager", "F.relu") if any(peer in r["us"] for r in here)]
        values = {peer: [r["us"].get(peer) for r in here] for peer in peers}
        _grouped(ax, [f"{r['form']} {r['direction']}" for r in here], values, report.number)
        ax.set_title(f"{device} tensor of {here[0]['shape'][0]} elements", fontsize=9)
        ax.set_ylabel("µs per call")
        ax.legend(fontsize=7)
    figure.suptitle(report.GROUPS["host"])
    return figure


def _saved(Figure, records: list[dict]):
    saved = report.saved_per_element(records)
    if not saved:
        return None
    figure = Figure(figsize=(max(6, 0.9 * len(saved) + 2), 4), layout="constrained")
    ax = figure.subplots()
    peers = [peer for peer in ("ours", "eager", "compile") if any(peer in by_peer for by_peer in saved.values())]
    values = {peer: [by_peer.get(peer) for by_peer in saved.values()] for peer in peers}
    _grouped(ax, [f"{form}\n{dtype}" for form, dtype in saved], values, "{:.3f}".format)
    ax.set_ylabel("bytes per element")
    ax.legend(fontsize=8)
    figure.suptitle("Saved for backward")
    return figure
