"""Measures my_cuda_op against stock PyTorch, torch.compile, Triton and a plain copy. README.md says how.

python benchmarks/run.py                                # writes build/benchmarks/results.{json,md} and plots
python benchmarks/run.py --only "relu .*bfloat16"       # the rows whose name matches
python benchmarks/run.py --compare results.json         # and exits non-zero where a row became slower
"""

from __future__ import annotations

import argparse
import atexit
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # cases.py, the table of operators
sys.path.insert(0, str(Path(__file__).resolve().parent))
# Compiled code starts from an empty cache, so that the seconds to the first step are those of a first step.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()

import measure
import plots
import report
import timing
import torch
from table import Case, rows


def main() -> int:
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
    args = parse()
    table = [row for row in rows(args.device, args.quick) if any(args.only.search(row.id(d)) for d in row.directions)]
    print(f"{len(table)} rows, {sum(row.compile for row in table)} of them with torch.compile", file=sys.stderr)
    if args.list:
        print(*(f"{row.id('+'.join(row.directions))}{', compile' * row.compile}" for row in table), sep="\n")
        return 0
    if args.compare:
        before = report.load(args.compare)  # first: --output may overwrite it
    timing.keep_pages()
    torch.manual_seed(0)
    results = {"environment": report.environment(args.device)}
    start = time.perf_counter()
    measured = run(table, args)
    if not measured["records"] and not measured["failed"]:
        print(f"no row matches {args.only.pattern!r}", file=sys.stderr)
        return 2
    seconds = time.perf_counter() - start
    results |= {"seconds": round(seconds, 1), **measured}
    report.save(results, args.output)
    drawn = plots.draw(results, args.output)
    print(report.summary(results))
    print(f"{len(results['records'])} measurements and {drawn} plots in {args.output}, {seconds:.0f} s")
    if results["failed"]:
        print("failed:", *results["failed"], sep="\n", file=sys.stderr)
        return 1
    return report.compare(before, results, args.threshold) if args.compare else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="few sizes, no torch.compile (the default on a CPU)")
    size.add_argument("--full", action="store_true", help="every row (the default on a GPU)")
    pattern = {"metavar": "PATTERN", "type": re.compile, "default": re.compile("")}
    parser.add_argument("--only", **pattern, help="rows whose name this regular expression finds")
    parser.add_argument("--list", action="store_true", help="print the rows, and measure nothing")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", metavar="DIR", type=Path, default=report.ROOT / "build" / "benchmarks")
    parser.add_argument("--compare", metavar="FILE", type=Path, help="an earlier results.json")
    parser.add_argument("--threshold", type=float, default=0.1, help="slower than this fails --compare (default: 0.1)")
    args = parser.parse_args()
    args.quick = args.quick or (args.device == "cpu" and not args.full)
    return args


def run(table: list[Case], args: argparse.Namespace) -> dict:
    """The records of the rows asked for, and which rows did not fit into memory, were interrupted, or failed."""
    records, skipped, failed = [], [], []
    compile_start = timing.start_of_compile(args.device) if any(row.compile for row in table) else None
    for number, row in enumerate(table, 1):
        name = row.id("+".join(row.directions))
        start = time.perf_counter()
        try:
            records += [record for record in measure.measure(row, args.device) if args.only.search(record["id"])]
        except KeyboardInterrupt:  # what is measured is worth having
            skipped += [row.id("+".join(row.directions)) for row in table[number - 1 :]]
            break
        except torch.OutOfMemoryError:
            skipped.append(name)
        except Exception as error:
            # A wrong result, or a peer that cannot: the other rows are worth having all the same.
            traceback.print_exc()
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        measure.release()
        print(f"{number}/{len(table)} {name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    for device in ["cpu", *["cuda"] * (args.device == "cuda")]:
        for op, direction, peers in measure.host_rows():
            if args.only.search(measure.host_id(op, direction, device)):
                records.append(measure.measure_host(op, direction, peers, device))
    return {"start_of_compile_s": compile_start, "skipped": skipped, "failed": failed, "records": records}


if __name__ == "__main__":
    sys.exit(main())
