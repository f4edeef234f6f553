"""The same measurements as pictures: PNG files beside results.json."""

from __future__ import annotations

import math
import re
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
        figures["bandwidth-" + re.sub(r"\W+", "-", form)] = _bandwidth(Figure, form, records)
    for group in ("layouts", "gradients", "channels", "fused"):
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
    """Bars below each other for each group, one of each peer."""
    width = 0.8 / max(1, len(values))
    for i, (peer, lengths) in enumerate(values.items()):
        at = [g + (i - (len(values) - 1) / 2) * width for g in range(len(groups))]
        label = LABELS.get(peer, "my_cuda_op" if peer == "ours" else peer)
        bars = ax.barh(at, [x or 0 for x in lengths], width, label=label, color=COLORS[peer])
        texts = [fmt(x) if x is not None else "" for x in lengths]
        ax.bar_label(bars, texts, fontsize=7, padding=2, bbox={"color": "white", "pad": 0.3})  # not through a mark
    ax.set_yticks(range(len(groups)), groups, fontsize=8)
    ax.set_ylim(len(groups) - 0.5, -0.5)  # the first on top
    ax.margins(x=0.12)
    ax.grid(axis="x", alpha=0.3)


def _legend(figure) -> None:
    """One legend below all panels, of what any of them shows."""
    entries = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=len(entries), fontsize=8)


def _panels(Figure, rows: int, columns: int, bars: int):
    """A figure of panels that have room for so many bars below each other; those of a row share their labels."""
    size = (4.5 * columns + 2.5, (0.16 * bars + 0.6) * rows + 1)
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharey="row")


def _bars(Figure, records: list[dict]):
    """Bandwidth by form and layout, with a mark at each ceiling: a column for each dtype, a row for each direction."""
    if not records:
        return None
    dtypes, directions = _distinct(records, "dtype"), _distinct(records, "direction")
    many = len(_distinct(records, "form")) > 1
    groups = list(dict.fromkeys((r["form"], r["layout"]) for r in records))
    peers = [peer for peer in ("ours", "eager", "compile") if any(peer in r["us"] for r in records)]
    figure, axes = _panels(Figure, len(directions), len(dtypes), len(groups) * len(peers))
    for row, direction in zip(axes, directions, strict=True):
        for ax, dtype in zip(row, dtypes, strict=True):
            here = {(r["form"], r["layout"]): r for r in records if (r["direction"], r["dtype"]) == (direction, dtype)}
            found = [here.get(group) for group in groups]
            values = {peer: [_gb_per_s(r, peer) if r and peer in r["us"] else None for r in found] for peer in peers}
            _grouped(ax, [f"{form}\n{layout}" if many else layout for form, layout in groups], values, report.number)
            ceilings = {g: _gb_per_s(r, "ceiling") for g, r in enumerate(found) if r}
            at = (ceilings.values(), [g - 0.42 for g in ceilings], [g + 0.42 for g in ceilings])
            ax.vlines(*at, color="black", linewidth=1, linestyle="--", label="best plain copy")
            ax.set_title(f"{direction}, {dtype}", fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel("GB/s")
    _legend(figure)
    figure.suptitle(report.GROUPS[records[0]["group"]])
    return figure


def _host(Figure, records: list[dict]):
    records = [r for r in records if r["group"] == "host"]
    if not records:
        return None
    devices = _distinct(records, "layout")
    groups = list(dict.fromkeys((r["form"], r["direction"]) for r in records))
    peers = [peer for peer in ("ours", "eager", "F.relu") if any(peer in r["us"] for r in records)]
    figure, axes = _panels(Figure, 1, len(devices), len(groups) * len(peers))
    for ax, device in zip(axes[0], devices, strict=True):
        here = {(r["form"], r["direction"]): r for r in records if r["layout"] == device}
        values = {peer: [here[group]["us"].get(peer) if group in here else None for group in groups] for peer in peers}
        _grouped(ax, [" ".join(group) for group in groups], values, report.number)
        ax.set_title(f"{device} tensor of {next(iter(here.values()))['shape'][0]} elements", fontsize=9)
        ax.set_xlabel("µs per call")
    _legend(figure)
    figure.suptitle(report.GROUPS["host"])
    return figure


def _saved(Figure, records: list[dict]):
    """A panel for float32 and one for bfloat16, with the forms of which any peer saves more than parameters."""
    saved = {
        (form, dtype): by_peer
        for (form, dtype), by_peer in report.saved_per_element(records).items()
        if dtype in ("float32", "bfloat16") and max(by_peer.values()) > 0.01
    }
    if not saved:
        return None
    forms, dtypes = (list(dict.fromkeys(key[i] for key in saved)) for i in range(2))
    peers = [peer for peer in ("ours", "eager", "compile") if any(peer in by_peer for by_peer in saved.values())]
    figure, axes = _panels(Figure, 1, len(dtypes), len(forms) * len(peers))
    for ax, dtype in zip(axes[0], dtypes, strict=True):
        values = {peer: [saved.get((form, dtype), {}).get(peer) for form in forms] for peer in peers}
        _grouped(ax, forms, values, "{:.3f}".format)
        ax.set_title(dtype, fontsize=9)
        ax.set_xlabel("bytes per element")
    _legend(figure)
    figure.suptitle("Saved for backward")
    return figure
