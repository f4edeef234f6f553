"""How long calls take: on a GPU by replaying CUDA graphs, on a CPU by the clock, and what the host pays for a call."""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

Function = Callable[..., Tensor]


def passes(function: Function, buffers: list[tuple], grads: list[Tensor] | None = None):
    """What ``medians`` samples: the function on every buffer without grad; with ``grads``, forward, then backward."""
    on_gpu = buffers[0][0].is_cuda
    return (CudaPasses if on_gpu else CpuPasses)(function, buffers, grads)


def medians(all_passes: dict) -> dict[str, list[float]]:
    """Microseconds per call of each pass of each peer. Peers take turns, so that a slow moment is shared by all."""
    times = {name: [] for name in all_passes}
    cuda = any(isinstance(p, CudaPasses) for p in all_passes.values())
    rounds, seconds = (15, 60) if cuda else (200, 0.05 * len(all_passes))
    for p in all_passes.values():
        p.sample()  # the first is slower
    start = time.perf_counter()
    for done in range(rounds):
        if done >= 5 and time.perf_counter() - start > seconds:
            break
        for name, p in all_passes.items():
            times[name].append(p.sample())
    return {name: [median(pass_) for pass_ in zip(*samples, strict=True)] for name, samples in times.items()}


def number_of_buffers(bytes: int, device: str) -> int:
    """How many calls a sample has, each on memory of its own.

    On a GPU they move a gibibyte together, which no cache holds, as far as 128 calls do. On a CPU there are many only
    where a single one is too short for the clock, and they stay in cache, where a small tensor would be.
    """
    if device == "cuda":
        return min(128, max(2, 2**30 // max(bytes, 1)))
    return min(32, max(1, 2**18 // max(bytes, 1)))


def keep_pages() -> None:
    """Lets glibc keep what is freed.

    Otherwise large results are mapped anew for each call, or not, depending on what was freed before; and where they
    are, the system's clearing of pages takes most of the time.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def wanted(args: tuple) -> list[Tensor]:
    return [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]


class CpuPasses:
    def __init__(self, function: Function, buffers: list[tuple], grads: list[Tensor] | None) -> None:
        self.function, self.buffers, self.grads = function, buffers, grads

    def sample(self) -> list[float]:
        times = [time.perf_counter()]
        with torch.set_grad_enabled(self.grads is not None):
            if self.grads is None:
                for args in self.buffers:
                    self.function(*args)
                times.append(time.perf_counter())
            else:
                outputs = [self.function(*args) for args in self.buffers]
                times.append(time.perf_counter())
                for args, output, grad in zip(self.buffers, outputs, self.grads, strict=True):
                    torch.autograd.grad(output, wanted(args), grad)
                times.append(time.perf_counter())
        return [(b - a) * 1e6 / len(self.buffers) for a, b in pairwise(times)]


class CudaPasses:
    """Forward in one graph and backward in another, which shares the first one's memory."""

    def __init__(self, function: Function, buffers: list[tuple], grads: list[Tensor] | None) -> None:
        self.calls = len(buffers)
        with torch.set_grad_enabled(grads is not None):
            # Warm up on the stream that is captured: autograd runs each backward on the stream of its forward.
            with torch.cuda.stream(_stream()):
                _stream().wait_stream(torch.cuda.default_stream())
                output = function(*buffers[0])
                if grads is not None:
                    torch.autograd.grad(output, wanted(buffers[0]), grads[0])
                del output
            torch.cuda.synchronize()
            forward, outputs = _capture(lambda: [function(*args) for args in buffers])
            self.graphs = [forward]
            if grads is not None:
                triples = list(zip(outputs, buffers, grads, strict=True))
                backward, _ = _capture(
                    lambda: [torch.autograd.grad(output, wanted(args), grad) for output, args, grad in triples],
                    pool=forward.pool(),
                )
                self.graphs.append(backward)

    def sample(self) -> list[float]:
        events = []
        with torch.cuda.stream(_stream()):
            for graph in self.graphs:
                # Reading this evicts everything else from the L2 cache, and takes long enough to hide the launch.
                _sweep().amax()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                events.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 / self.calls for start, end in events]


def _capture(calls: Callable[[], list], pool=None) -> tuple[torch.cuda.CUDAGraph, list]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=_stream()):
        results = calls()  # all alive to the end: no call writes where another one did
    return graph, results


@functools.cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@functools.cache
def _sweep() -> Tensor:
    l2 = torch.cuda.get_device_properties().L2_cache_size
    return torch.zeros(max(4 * l2, 2**28) // 4, device="cuda")


def host_us(statement: str, names: dict, seconds: float = 0.2) -> float:
    """Microseconds from one call to the next, for tensors so small that nothing else counts."""
    return Timer(statement, globals=names).blocked_autorange(min_run_time=seconds).median * 1e6


def start_of_compile(device: str) -> float:
    """Seconds of this process's first torch.compile, most of which no later one needs."""
    with torch.no_grad():
        return first_step(torch.compile(lambda x: x + 1), (torch.zeros(16, device=device),), torch.empty_like)


def first_step(function: Function, args: tuple, make_grad: Callable[[Tensor], Tensor]) -> float:
    """Seconds of the first forward and backward: torch.compile compiles in there."""
    start = time.perf_counter()
    output = function(*args)
    if output.requires_grad:
        torch.autograd.grad(output, wanted(args), make_grad(output))
    if output.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def saved_bytes(function: Function, args: tuple) -> int:
    """Bytes that forward keeps for backward. A tensor that others keep alive, too, counts all the same."""
    saved = {}

    def pack(tensor):
        saved[tensor.data_ptr(), tensor.shape, tensor.dtype] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*args)
    return sum(saved.values())


def peak_bytes(function: Function, args: tuple, grad: Tensor) -> int:
    """The most GPU memory that one forward and backward needs beyond what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = function(*args)
    torch.autograd.grad(output, wanted(args), grad.to(output.dtype))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
