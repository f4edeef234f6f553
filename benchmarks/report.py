"""What becomes of the measurements: JSON to compare with, Markdown to read."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

import my_cuda_op

ROOT = Path(__file__).resolve().parents[1]
PEERS = ["eager", "compile", "triton", "F.relu"]
GROUPS = {
    "sizes": "Contiguous tensors",
    "layouts": "Layouts of the input",
    "gradients": "Layouts of the incoming gradient",
    "channels": "A tensor of parameters",
    "fused": "Fused, with a tensor of parameters",
    "host": "Host time per call",
}


def environment(device: str) -> dict:
    """Where and with what this was measured."""
    result = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "device": device}
    result["cpu"] = f"{_cpu()}, {torch.get_num_threads()} threads"
    if hasattr(os, "getloadavg"):
        result["load"] = round(os.getloadavg()[0], 1)  # before we start: much above 0, others share the processors
    result["gpu"] = torch.cuda.get_device_name() if device == "cuda" else None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    result["driver"] = _output(query) if device == "cuda" else None
    result |= {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    result |= {"my_cuda_op": my_cuda_op.__version__, "build": my_cuda_op.build_info()}
    # GIT_COMMIT is for a copy of the sources that has no repository around it.
    result["commit"] = os.environ.get("GIT_COMMIT") or _output(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    )
    return result


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def save(results: dict, folder: Path) -> None:
    """Writes results.json and results.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "results.md").write_text(markdown(results))


def ratio(record: dict, peer: str) -> float | None:
    """How many times as fast as this peer we are; of the ceiling, which part we reach."""
    us = record["us"]
    return us[peer] / us["ours"] if peer in us else None


def summary(results: dict) -> str:
    """For each peer: in how many of the measurements we are as fast, and by what factor, in the geometric mean."""
    lines = []
    for peer in PEERS:
        ratios = [r for record in results["records"] if record["group"] != "host" and (r := ratio(record, peer))]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            fast = sum(r >= 0.98 for r in ratios)
            lines.append(
                f"vs {peer}: {fast} of {len(ratios)} rows at 0.98x or more; "
                f"{min(ratios):.2f}x to {max(ratios):.2f}x, mean {mean:.2f}x"
            )
    return "\n".join(lines)


def markdown(results: dict) -> str:
    parts = ["# Benchmark results", "Written by `benchmarks/run.py`; `benchmarks/README.md` says how to read them."]
    parts.append("\n".join(f"- {name}: {value}" for name, value in results["environment"].items() if value is not None))
    parts.append("\n".join(f"- {line}" for line in summary(results).splitlines()))
    for group, title in GROUPS.items():
        records = [record for record in results["records"] if record["group"] == group]
        if records:
            parts += [f"## {title}", _host(records) if group == "host" else _times(records)]
    records = [record for record in results["records"] if "saved_bytes" in record]
    if records:
        parts += ["## Bytes per element saved for backward", _saved(records)]
    records = [record for record in results["records"] if "first_step_s" in record]
    if records:
        start = f"The first torch.compile of a process takes {results['start_of_compile_s']:.1f} s besides."
        parts += ["## Seconds to the first step", start, _first_steps(records)]
    records = [record for record in results["records"] if "peak_bytes" in record and record["direction"] == "step"]
    if records:
        parts += ["## Peak memory of a step, MiB", _peaks(records)]
    if results["failed"]:
        parts += ["## Failed", "\n".join(f"- {name}" for name in results["failed"])]
    if results["skipped"]:
        parts += [
            "## Left out, because memory did not suffice or the run was interrupted",
            "\n".join(f"- {name}" for name in results["skipped"]),
        ]
    return "\n\n".join(parts) + "\n"


def _table(header: list[str], lines: list[list]) -> str:
    cells = [["" if cell is None else str(cell) for cell in line] for line in lines]
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *cells])


def number(x: float | None) -> str | None:
    """Three significant digits, and no exponent."""
    if x is None:
        return None
    return f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}" if x > 0 else "0"


def _times(records: list[dict]) -> str:
    peers = [peer for peer in ("eager", "compile", "triton") if any(peer in record["us"] for record in records)]
    header = ["", "ours, µs", *peers, "ceiling", "GB/s", *[f"vs {peer}" for peer in peers], "of the ceiling"]
    lines = []
    for record in records:
        us = record["us"]
        times = [number(us.get(peer)) for peer in ("ours", *peers, "ceiling")]
        ratios = [_times_as_fast(ratio(record, peer)) for peer in (*peers, "ceiling")]
        lines.append([f"`{record['id']}`", *times, number(record["bytes"] / us["ours"] / 1e3), *ratios])
    return _table(header, lines)


def _times_as_fast(x: float | None) -> str | None:
    return None if x is None else f"{x:.2f}"


def _host(records: list[dict]) -> str:
    lines = []
    for record in records:
        us = record["us"]
        lines.append([f"`{record['id']}`", *[number(us.get(peer)) for peer in ("ours", "eager", "F.relu")]])
        lines[-1].append(_times_as_fast(ratio(record, "eager")))
    return _table(["", "ours, µs", "eager", "F.relu", "vs eager"], lines)


def _saved(records: list[dict]) -> str:
    header, lines = ["", "ours", "eager", "compile"], []
    for (form, dtype), saved in saved_per_element(records).items():
        lines.append([f"`{form} {dtype}`", *[f"{saved[peer]:.3f}" if peer in saved else None for peer in header[1:]]])
    return _table(header, lines)


def saved_per_element(records: list[dict]) -> dict[tuple[str, str], dict[str, float]]:
    """By form and dtype, from the largest tensor (and torch.compile from the largest that it was measured with)."""
    result: dict = {}
    for record in sorted((r for r in records if "saved_bytes" in r), key=lambda r: math.prod(r["shape"])):
        saved = {peer: bytes / math.prod(record["shape"]) for peer, bytes in record["saved_bytes"].items()}
        result.setdefault((record["form"], record["dtype"]), {}).update(saved)
    return result


def _first_steps(records: list[dict]) -> str:
    by_row = {f"{r['form']} {r['dtype']} {r['layout']}": r["first_step_s"] for r in records}
    lines = [[f"`{name}`", number(s["ours"]), number(s["compile"])] for name, s in by_row.items()]
    return _table(["", "ours", "compile"], lines)


def _peaks(records: list[dict]) -> str:
    lines = []
    for record in records:
        peaks = record["peak_bytes"]
        mib = [f"{peaks[peer] / 2**20:.0f}" if peer in peaks else None for peer in ("ours", "eager", "compile")]
        lines.append([f"`{record['id']}`", *mib])
    return _table(["", "ours", "eager", "compile"], lines)


def compare(before: dict, after: dict, threshold: float) -> int:
    """Prints how each row changed; 1 where one became slower by more than the threshold.

    Compared is our time over stock's in the same run: what differs between two machines or two moments cancels.
    """
    old = {record["id"]: record for record in before["records"]}
    names = [results["environment"]["gpu"] or results["environment"]["cpu"] for results in (before, after)]
    if names[0] != names[1]:
        print(f"warning: measured on {names[1]}, compared with {names[0]}", file=sys.stderr)
    changes = []
    for record in after["records"]:
        if record["id"] in old:
            changes.append((ratio(old[record["id"]], "eager") / ratio(record, "eager") - 1, record["id"]))
    if not changes:
        print("no row is in both results", file=sys.stderr)
        return 2
    for change, name in sorted(changes):
        print(f"{change:+7.1%}  {name}{'  SLOWER' if change > threshold else ''}")
    slower = sum(change > threshold for change, _ in changes)
    print(f"{slower} of {len(changes)} rows slower by more than {threshold:.0%}, relative to stock")
    return 1 if slower else 0
