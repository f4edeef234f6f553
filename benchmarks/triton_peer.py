"""The operators written by hand in Triton, for contiguous tensors: one 16-byte vector for each thread."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 8


@triton.jit
def _map(x, y, output, a, b, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    v = tl.load(x + i, mask=inside).to(tl.float32)
    if OP == "scale":
        v = v * a
    elif OP == "add_scalar":
        v = v + b
    elif OP == "relu":
        v = tl.where(v <= 0, 0.0, v)
    elif OP == "scale_add":
        v = v * a + b
    elif OP == "scale_add_relu":
        v = v * a + b
        v = tl.where(v <= 0, 0.0, v)
    elif OP == "scale_relu_backward":  # x is the gradient, y the output
        v = tl.where(tl.load(y + i, mask=inside) <= 0, 0.0, v * a)
    tl.store(output + i, v.to(output.dtype.element_ty), mask=inside)


def _launch(op: str, x: Tensor, y: Tensor, a: float, b: float) -> Tensor:
    output = torch.empty_like(x)
    block = WARPS * 32 * 16 // x.element_size()
    _map[(triton.cdiv(x.numel(), block),)](x, y, output, float(a), float(b), x.numel(), op, block, num_warps=WARPS)
    return output


class _Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, op, a, b):
        output = _launch(op, x, x, a, b)
        ctx.a, ctx.relu = a, op.endswith("relu")
        if ctx.relu:
            ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx, grad):
        if ctx.relu:
            return _launch("scale_relu_backward", grad, *ctx.saved_tensors, ctx.a, 0.0), None, None, None
        return _launch("scale", grad, grad, ctx.a, 0.0), None, None, None


FUNCTIONS = {
    "copy": lambda x: _launch("copy", x, x, 0.0, 0.0),
    "scale": lambda x, a: _Elementwise.apply(x, "scale", a, 0.0),
    "add_scalar": lambda x, b: _Elementwise.apply(x, "add_scalar", 1.0, b),
    "relu": lambda x: _Elementwise.apply(x, "relu", 1.0, 0.0),
    "scale_add": lambda x, a, b: _Elementwise.apply(x, "scale_add", a, b),
    "scale_add_relu": lambda x, a, b: _Elementwise.apply(x, "scale_add_relu", a, b),
}
