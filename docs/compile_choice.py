"""What should compiled code run? python docs/compile_choice.py [--quick] [--output build/compile_choice.json]

Times a training step (forward and backward) of small models with our operators: compiled with either choice of
`my_cuda_op.compile_with`, and not compiled, beside their stock twins. Writes a JSON file, and a table beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from report import environment

import my_cuda_op
from my_cuda_op import nn as mnn


class StockScaleAddReLU(nn.Module):
    """``relu(x * weight + bias)``, as it is typed without this package."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(num_channels)), nn.Parameter(torch.zeros(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * self.weight[:, None, None] + self.bias[:, None, None])


class StockScale(nn.Module):
    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[:, None, None]


class Chain(nn.Module):
    """conv -> operator -> add -> operator."""

    def __init__(self, channels: int, operator) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first, self.second = operator(channels), operator(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.conv(x)) + x)


# {workload: (model with our operators, its stock twin, channels)}
OPERATORS = {
    "relu": (lambda c: mnn.ReLU(), lambda c: nn.ReLU()),
    "scale": (lambda c: mnn.Scale(num_channels=c), StockScale),
    "scale_add_relu": (lambda c: mnn.ScaleAddReLU(num_channels=c), StockScaleAddReLU),
}
WORKLOADS = {
    f"conv, {name}, add, {name}": (lambda c, f=ours: Chain(c, f), lambda c, f=stock: Chain(c, f), 64)
    for name, (ours, stock) in OPERATORS.items()
}
WORKLOADS["layer of scale_add_relu"] = (*OPERATORS["scale_add_relu"], 256)

# {name: (is it ours?, what compile_with gets; None: not compiled)}
VARIANTS = {
    "ours, decomposition": (True, "decomposition"),
    "ours, kernels": (True, "kernels"),
    "stock, compiled": (False, "decomposition"),
    "ours, not compiled": (True, None),
    "stock, not compiled": (False, None),
}


class Step:
    """A training step of one variant, without the optimizer."""

    def __init__(self, model: nn.Module, choice: str | None, backend: str, x: Tensor, grad: Tensor) -> None:
        self.choice, self.x, self.grad = choice, x, grad
        self.wanted = [x, *model.parameters()]
        self.run = model if choice is None else torch.compile(model, backend=backend, fullgraph=True, dynamic=False)

    def __call__(self) -> tuple[Tensor, ...]:
        with my_cuda_op.compile_with(self.choice) if self.choice else contextlib.nullcontext():
            return torch.autograd.grad(self.run(self.x), self.wanted, self.grad)


def milliseconds(step: Step, times: int) -> float:
    """Of one step, when so many follow one another."""
    if not step.x.is_cuda:
        start = time.perf_counter()
        for _ in range(times):
            step()
        return (time.perf_counter() - start) / times * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def peak_mib(step: Step) -> float | None:
    """The most GPU memory that a step needs beyond what was there."""
    if not step.x.is_cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def measure(workload: str, dtype: torch.dtype, device: str, quick: bool, backend: str) -> dict:
    """Median milliseconds of each variant, which take turns."""
    make_ours, make_stock, channels = WORKLOADS[workload]
    shape = (2, 8, 6, 6) if quick else (64, channels, 56, 56)
    options = {"device": device, "dtype": dtype, "memory_format": torch.channels_last}
    x = torch.randn(shape).to(**options).requires_grad_()
    grad = torch.randn(shape).to(**options)
    ours, stock = make_ours(shape[1]), make_stock(shape[1])
    ours.load_state_dict(stock.state_dict())
    models = {True: ours.to(**options), False: stock.to(**options)}
    torch.compiler.reset()  # each workload far from the limit of recompilations
    steps = {
        name: Step(copy.deepcopy(models[is_ours]), choice, backend, x, grad)
        for name, (is_ours, choice) in VARIANTS.items()
    }
    expected = steps["stock, not compiled"]()
    for name, step in steps.items():
        check(f"{workload}, {dtype}, {name}", step(), expected)
        milliseconds(step, 3)  # the first are slower
    rounds, times = (2, 2) if quick else (25, 10)
    samples = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            samples[name].append(milliseconds(step, times))
    return {
        "workload": workload,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
        "ms": {name: float(f"{median(ms):.4g}") for name, ms in samples.items()},
        "peak_mib": {name: peak_mib(step) for name, step in steps.items()},
    }


def check(what: str, actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Roughly: it is the wrong work that must not be timed. The tests compare closely."""
    for a, e in zip(actual, expected, strict=True):
        error = ((a - e).float().norm() / e.float().norm()).item()
        if not error < 0.2:  # signs near 0 depend on rounding, and each that differs lets another gradient pass
            raise AssertionError(f"{what}: the gradients must be those of stock, got a relative error of {error:.2g}")


def table(results: list[dict]) -> str:
    lines = ["| ms of a step | " + " | ".join(VARIANTS) + " |", "|---" * (len(VARIANTS) + 1) + "|"]
    for result in results:
        cells = []
        for name in VARIANTS:
            memory = result["peak_mib"][name]
            cells.append(f"{result['ms'][name]:.3f}" + ("" if memory is None else f" ({memory:.0f} MiB)"))
        lines.append(f"| {result['workload']}, {result['dtype']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small tensors and few repetitions: does it run?")
    parser.add_argument("--output", type=Path, default=Path("build/compile_choice.json"))
    parser.add_argument("--backend", default="inductor", help="of torch.compile; aot_eager compiles nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True  # the same convolution for all variants
    about, results = {**environment(args.device), "backend": args.backend}, []
    for workload in WORKLOADS:
        for dtype in (torch.float32, torch.bfloat16):
            results.append(measure(workload, dtype, args.device, args.quick, args.backend))
            print(table(results[-1:]).splitlines()[-1], flush=True)
            write({**about, "results": results}, args.output)


def write(measured: dict, output: Path) -> None:
    """The JSON file, and a table beside it."""
    output.write_text(json.dumps(measured, indent=1) + "\n")
    where = ", ".join(str(measured[key]) for key in ("gpu", "driver", "cpu", "torch", "commit") if measured[key])
    output.with_suffix(".md").write_text(
        "# What compiled code runs\n\n"
        "Written by `docs/compile_choice.py`: milliseconds of a training step by the clock, when many follow one\n"
        "another, and in brackets the most memory that it needs.\n\n"
        f"{where}\n\n{table(measured['results'])}\n"
    )


if __name__ == "__main__":
    main()
