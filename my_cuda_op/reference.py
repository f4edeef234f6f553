"""The operators in plain PyTorch: what each of them must equal.

The tests compare with these functions, the benchmarks measure against them, fake tensors take their shapes, dtypes and
strides from them, devices without kernels run them, and so does compiled code, where Inductor fuses them with their
neighbours.

A result is computed in float32 where it is float16 or bfloat16 (the parameters too), and rounded once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

Number = int | float | complex | bool

_COMPUTE_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def result_type(input: Tensor, parameter: Tensor | Number) -> torch.dtype:
    """``torch.result_type`` of the input and the parameter as a number, which never widens a floating-point input."""
    if isinstance(parameter, Tensor):
        if parameter.dtype == input.dtype:
            return input.dtype
        parameter = torch.empty((), dtype=parameter.dtype, device="meta")
    elif input.is_floating_point() and not isinstance(parameter, complex):
        return input.dtype
    # Dynamo does not trace torch.result_type, but the dtype of a product without elements.
    return (torch.empty([0] * input.dim(), dtype=input.dtype, device="meta") * parameter).dtype


def can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """``torch.can_cast``, which Dynamo does not trace: may an operator in place store its result in the input?"""
    if source.is_complex:
        return target.is_complex
    if source.is_floating_point:
        return target.is_floating_point or target.is_complex
    return source == torch.bool or target != torch.bool


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a result of this dtype is computed."""
    return _COMPUTE_DTYPES.get(dtype, dtype)


def channel_dim(op: str, input: Tensor, name: str, parameter: Tensor, dim: int) -> int | None:
    """The dimension of the input along which the parameter varies; None where it has one element."""
    if parameter.device != input.device and (parameter.dim() > 0 or parameter.device.type != "cpu"):
        raise RuntimeError(f"{op}: {name} must be on the device of input, {input.device}, got {parameter.device}")
    if parameter.numel() == 1:
        return None
    if parameter.dim() != 1:
        raise RuntimeError(
            f"{op}: {name} must be a number, have one element, or have one dimension, got shape {list(parameter.shape)}"
        )
    dims = max(input.dim(), 1)  # stock's range for a 0-d tensor; then size(dim) raises
    if not -dims <= dim < dims:
        raise IndexError(
            f"{op}: dim must be in the range [{-dims}, {dims - 1}] of an input of shape {list(input.shape)}, got {dim}"
        )
    if parameter.numel() != input.size(dim):
        raise RuntimeError(
            f"{op}: {name} must have 1 or {input.size(dim)} elements (input.size({dim})), got {parameter.numel()}"
        )
    return dim % input.dim()


def broadcast(op: str, input: Tensor, name: str, parameter: Tensor | Number, dim: int) -> Tensor | Number:
    """The parameter in a shape that broadcasts against the input."""
    if not isinstance(parameter, Tensor):
        return parameter
    return as_channels(parameter, input.dim(), channel_dim(op, input, name, parameter, dim))


def as_channels(parameter: Tensor, ndim: int, channel: int | None) -> Tensor:
    """The parameter in a shape that broadcasts to ndim dimensions and varies along channel (None: has one element)."""
    if channel is None:  # not always 0-d: a DTensor of shape (1,) that is sharded cannot lose its dimension
        return parameter.reshape([1] * min(parameter.dim(), ndim))
    return parameter.reshape([-1 if d == channel else 1 for d in range(ndim)])


def _rounded(op: str, formula, input: Tensor, dim: int, **parameters: Tensor | Number) -> Tensor:
    """formula(input, *parameters) in the compute type, rounded to the result's."""
    dtype, *others = (result_type(input, parameter) for parameter in parameters.values())
    for other in others:  # not with the input's own, which PyTorch may promote with a number only (uint16)
        dtype = torch.promote_types(dtype, other)
    compute = compute_type(dtype)
    operands = []
    for name, parameter in parameters.items():
        parameter = broadcast(op, input, name, parameter, dim)
        operands.append(parameter.to(compute) if isinstance(parameter, Tensor) else parameter)
    return formula(input.to(compute), *operands).to(dtype)


def scale(input: Tensor, factor: Tensor | Number, dim: int = 1) -> Tensor:
    return _rounded("scale", torch.mul, input, dim, factor=factor)


def add_scalar(input: Tensor, value: Tensor | Number, dim: int = 1) -> Tensor:
    return _rounded("add_scalar", torch.add, input, dim, value=value)


def relu(input: Tensor) -> Tensor:
    return torch.relu(input)


def scale_add(
    input: Tensor, factor: Tensor | Number, value: Tensor | Number, residual: Tensor | None = None, dim: int = 1
) -> Tensor:
    return _scale_add("scale_add", input, factor, value, residual, dim)


def scale_add_relu(
    input: Tensor, factor: Tensor | Number, value: Tensor | Number, residual: Tensor | None = None, dim: int = 1
) -> Tensor:
    return torch.relu(_scale_add("scale_add_relu", input, factor, value, residual, dim))


def _scale_add(op, input, factor, value, residual, dim):
    if residual is None:
        return _rounded(op, lambda x, w, b: x * w + b, input, dim, factor=factor, value=value)
    for what in ("shape", "dtype", "device"):
        must, got = getattr(input, what), getattr(residual, what)
        if got != must:
            raise RuntimeError(f"{op}: residual must have the {what} of input, {must}, got {got}")
    return _rounded(op, lambda x, w, b: x * w + b + residual.to(x.dtype), input, dim, factor=factor, value=value)


def pack(output: Tensor) -> Tensor:
    """The mask of a dense tensor that came out of a ReLU: bit n is that of the n-th element in memory."""
    numel = output.numel()
    size = (numel + 31) // 32 * 4  # said once and for all: a size to be found out would be a guard on a dynamic one
    keep = ~(output <= 0).as_strided([numel], [1])
    keep = torch.nn.functional.pad(keep, [0, size * 8 - numel]).view(size, 8).to(torch.uint8)
    return (keep << torch.arange(8, dtype=torch.uint8, device=output.device)).sum(1, dtype=torch.uint8)


def unpack(mask: Tensor, size: list[int], strides: list[int]) -> Tensor:
    """The mask as booleans, of an output of this size and these strides."""
    bits = mask[:, None] >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1
    return bits.flatten().bool().as_strided(size, strides)


def scale_add_relu_masked(
    input: Tensor, factor: Tensor | Number, value: Tensor | Number, residual: Tensor | None = None, dim: int = 1
) -> tuple[Tensor, Tensor]:
    output = scale_add_relu(input, factor, value, residual, dim)
    return output, pack(output)


def scale_add_backward(
    grad: Tensor,
    input: Tensor | None,
    mask: Tensor | None,
    strides: list[int],
    factor: Tensor | Number,
    value: Tensor | None,
    needs: list[bool],
    dim: int = 1,
) -> list[Tensor]:
    if mask is not None:
        grad = torch.where(unpack(mask, grad.shape, strides), grad, 0)
    by_input, by_factor, by_value, by_residual = needs
    gradients = []
    if by_input:
        conjugate = factor.conj() if isinstance(factor, Tensor) else factor.conjugate()
        gradients.append(scale(grad, conjugate, dim))
    if by_factor:
        gradients.append(scale_backward_factor(grad, input, factor, dim))
    if by_value:
        gradients.append(add_scalar_backward_value(grad, value, dim))
    return gradients + [grad] * by_residual


def scale_backward_factor(grad: Tensor, input: Tensor, factor: Tensor, dim: int = 1) -> Tensor:
    compute = compute_type(torch.result_type(grad, input))
    products = grad.to(compute) * input.to(compute).conj()
    return _sum_like("scale_backward_factor", products, "factor", factor, dim)


def add_scalar_backward_value(grad: Tensor, value: Tensor, dim: int = 1) -> Tensor:
    return _sum_like("add_scalar_backward_value", grad.to(compute_type(grad.dtype)), "value", value, dim)


def relu_backward(grad: Tensor, result: Tensor) -> Tensor:
    return torch.ops.aten.threshold_backward(grad, result, 0)


def _sum_like(op: str, terms: Tensor, name: str, parameter: Tensor, dim: int) -> Tensor:
    """The terms summed to the shape and dtype of the parameter."""
    channel = channel_dim(op, terms, name, parameter, dim)
    if terms.is_complex() and not parameter.is_complex():
        terms = terms.real
    others = [d for d in range(terms.dim()) if d != channel]
    total = terms.sum(others) if others else terms
    return total.to(parameter.dtype).reshape(parameter.shape)
