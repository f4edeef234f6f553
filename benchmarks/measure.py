"""Measures one row: makes its inputs, checks every peer against the reference, then times them side by side."""

from __future__ import annotations

import functools
import gc

import timing
import torch
from table import Case
from torch import Tensor

import my_cuda_op

try:
    import triton_peer
except ImportError:  # no Triton on this platform
    triton_peer = None

HOST_ELEMENTS = {"cpu": 16, "cuda": 256}


def measure(case: Case, device: str) -> list[dict]:
    """A record for each direction of the row."""
    calls = timing.number_of_buffers(2 * torch.Size(case.shape).numel() * case.dtype.itemsize, device)
    buffers = [case.make(device) for _ in range(calls)]
    peers, seconds = _peers(case, buffers[0], device)
    with torch.no_grad():
        output = case.form.ours(*buffers[0])
    grads = [case.make_grad(output) for _ in buffers]
    bytes_moved = case.form.bytes_moved(buffers[0], output, grads[0])
    learns = case.directions != ("forward",)
    check(case, peers, buffers[0], grads[0])

    us = {}
    if "forward" in case.directions:
        times = timing.medians({name: timing.passes(peer, buffers) for name, peer in peers.items()})
        us["forward"] = {name: t for name, (t,) in times.items()}
    if learns:
        times = timing.medians(_backward_passes(case, peers, buffers, grads))
        us["backward"] = {name: pass_[-1] for name, pass_ in times.items()}
        us["step"] = {name: sum(pass_) for name, pass_ in times.items()}
    records = []
    for direction in case.directions:
        ceiling_us, ceiling_by = ceiling(bytes_moved[direction], device)
        record = {"id": case.id(direction), "group": case.group, "form": case.form.name, "direction": direction}
        record |= {"dtype": str(case.dtype).removeprefix("torch."), "layout": case.layout, "shape": list(case.shape)}
        record["us"] = _rounded(us[direction] | {"ceiling": ceiling_us})
        record |= {"ceiling_by": ceiling_by, "bytes": bytes_moved[direction]}
        if seconds:
            record["first_step_s"] = _rounded(seconds)
        if direction != "forward":
            saving = {name: peer for name, peer in peers.items() if name != "triton"}
            record["saved_bytes"] = {n: timing.saved_bytes(peer, buffers[0]) for n, peer in saving.items()}
            if device == "cuda" and case.group != "gradients":
                record["peak_bytes"] = {n: timing.peak_bytes(peer, buffers[0], grads[0]) for n, peer in saving.items()}
        records.append(record)
    return records


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{number:.4g}") for name, number in numbers.items()}


def _peers(case: Case, args: tuple, device: str) -> tuple[dict, dict]:
    """The implementations by name; and the seconds that the first step took where torch.compile is among them."""
    form = case.form
    peers = {"ours": form.ours, "eager": form.stock}
    seconds = {}
    if device == "cuda" and case.group == "sizes" and case.dtype != torch.float64:  # it computes in float32
        by_hand = triton_peer.FUNCTIONS if triton_peer else {}
        if form.op.name in by_hand:
            peers["triton"] = by_hand[form.op.name]
    if case.compile:
        torch.compiler.reset()  # each row starts afresh: for its very shape, and far from the limit of recompilations
    if case.compile and case.group != "gradients":
        peers["compile"] = torch.compile(form.stock, dynamic=False)
        with torch.set_grad_enabled(case.directions != ("forward",)):
            for name in ("ours", "compile"):
                seconds[name] = timing.first_step(peers[name], args, torch.empty_like)
    return peers, seconds


def _backward_passes(case, peers, buffers, grads) -> dict:
    passes = {}
    for name, peer in peers.items():
        with torch.no_grad():
            dtype = peer(*buffers[0]).dtype  # stock can widen the result where ours does not
        passes[name] = timing.passes(peer, buffers, [grad.to(dtype) for grad in grads])
    if case.compile and case.group == "gradients":
        # Behind autograd, compiled code copies a gradient whose layout it has not foreseen. This is the best that it
        # could do: the backward alone, compiled for this layout.
        gradient = torch.compile(case.form.gradient, dynamic=False)
        pairs = [(grad, case.form.stock(*args).detach()) for args, grad in zip(buffers, grads, strict=True)]
        (expected,) = torch.autograd.grad(case.form.stock(*buffers[0]), timing.wanted(buffers[0]), grads[0])
        _must_agree(case, "gradients", "compile", gradient(*pairs[0]), expected)
        passes["compile"] = timing.passes(gradient, pairs)
    return passes


def check(case: Case, peers: dict, args: tuple, grad: Tensor) -> None:
    """Raises where a peer's values or gradients are not the reference's. Ours are compared element by element."""
    learns = case.directions != ("forward",)
    with torch.set_grad_enabled(learns):
        wanted = timing.wanted(args)
        expected = case.form.expected(*args)
        for name, peer in peers.items():
            actual = peer(*args)
            _must_agree(case, "values", name, actual, expected, exact=name == "ours")
            if not learns:
                continue
            # Where the values agree, and are on two sides of 0, rounding decided whether a ReLU lets a gradient pass.
            apart = (actual > 0) != (expected > 0)
            incoming = grad.masked_fill(apart, 0) if apart.any() else grad
            theirs = torch.autograd.grad(actual, wanted, incoming.to(actual.dtype))
            right = torch.autograd.grad(expected, wanted, incoming, retain_graph=True)
            for a, e in zip(theirs, right, strict=True):
                # A parameter's gradient is a long sum, in which roundings add up and terms cancel.
                _must_agree(case, "gradients", name, a, e, exact=name == "ours" and e.numel() == args[0].numel())


def _must_agree(case: Case, what: str, name: str, actual: Tensor, expected: Tensor, exact: bool = False) -> None:
    if actual.shape != expected.shape or not _close(actual.detach().to(expected.dtype), expected.detach(), exact):
        raise AssertionError(f"{case.id('')}: the {what} of {name} must be those of the reference, got others")


def _close(actual: Tensor, expected: Tensor, exact: bool) -> bool:
    if exact:
        try:
            torch.testing.assert_close(actual, expected)
        except AssertionError:
            return False
        return True
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 2e-2
    difference, norm = torch.linalg.vector_norm((actual - expected).float()), torch.linalg.vector_norm(expected.float())
    return (difference <= tolerance * norm).item()  # <=: a gradient that is expanded from one number can be all zeros


@functools.cache
def ceiling(bytes: int, device: str) -> tuple[float, str]:
    """Microseconds of the best of several plain copies that move this many bytes, and which it was."""
    elements = max(1, bytes // 8)  # of four bytes, each of them read and written
    copies = {"torch copy": torch.clone, "x * 1": lambda x: x * 1, "our scale by 1": lambda x: my_cuda_op.scale(x, 1)}
    if device == "cuda" and triton_peer:
        copies["triton copy"] = triton_peer.FUNCTIONS["copy"]
    calls = timing.number_of_buffers(bytes, device)
    buffers = [(torch.empty(elements, device=device).normal_(),) for _ in range(calls)]
    times = timing.medians({name: timing.passes(copy, buffers) for name, copy in copies.items()})
    return min((us, name) for name, (us,) in times.items())


def host_rows() -> list[tuple[str, str, dict]]:
    """Rows of (operator, direction, each peer's statement), in which F is torch.nn.functional and m is my_cuda_op."""
    statements = {
        "scale": {"ours": "m.scale(x, 0.7)", "eager": "x * 0.7"},
        "add_scalar": {"ours": "m.add_scalar(x, 0.3)", "eager": "x + 0.3"},
        "relu": {"ours": "m.relu(x)", "eager": "torch.relu(x)", "F.relu": "F.relu(x)"},
        "scale_add_relu": {"ours": "m.scale_add_relu(x, 0.7, 0.3)", "eager": "torch.relu(x * 0.7 + 0.3)"},
    }
    table = []
    for op, peers in statements.items():
        table.append((op, "forward", peers))
        table.append((op, "step", {name: f"grad({call}, x, g)" for name, call in peers.items()}))
    return table


def host_id(op: str, direction: str, device: str) -> str:
    return f"{op} host {direction} {device}"


def measure_host(op: str, direction: str, peers: dict, device: str) -> dict:
    """A record of what one call costs the host."""
    n = HOST_ELEMENTS[device]
    x, g = torch.randn(n, device=device), torch.randn(n, device=device)
    names = {"torch": torch, "F": torch.nn.functional, "m": my_cuda_op, "grad": torch.autograd.grad, "g": g}
    names["x"] = x.requires_grad_(direction == "step")
    us = {name: timing.host_us(statement, names) for name, statement in peers.items()}
    record = {"id": host_id(op, direction, device), "group": "host", "form": op, "direction": direction}
    return record | {"dtype": "float32", "layout": device, "shape": [n], "us": _rounded(us)}


def release() -> None:
    """Gives the memory of the last row back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
