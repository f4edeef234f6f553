"""The derivatives: one ``torch.autograd.Function`` for each operator, and nowhere else a derivative.

``backward`` and ``jvp`` are written with differentiable operators, so derivatives of every order follow. The operators
in the dispatcher run the same Functions (see library.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from my_cuda_op import reference
from my_cuda_op.routing import Operator, Transformable


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A derivative in the dtype of what it belongs to; of a real number it is real."""
    if tensor.is_complex() and not dtype.is_complex:
        tensor = tensor.real
    return tensor.to(dtype)


def _template(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that stands for one of which only this much matters: saving that one would forbid its change."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


def _expand(parameter: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """The parameter at every element that it applies to."""
    channel = None if parameter.numel() == 1 else dim % len(shape)
    return reference.as_channels(parameter, len(shape), channel).expand(shape)


def _conj(parameter: Any) -> Any:
    return parameter.conj() if isinstance(parameter, Tensor) else parameter.conjugate()


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


class Scale(Function):
    @staticmethod
    def forward(input, factor, dim):
        return scale.kernel(input, factor, dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, factor, ctx.dim = inputs
        ctx.dtype = input.dtype
        ctx.set_materialize_grads(False)
        if isinstance(factor, Tensor):
            ctx.number = None
            ctx.factor = (factor.shape, factor.dtype, factor.device)
            ctx.save_for_backward(
                input if ctx.needs_input_grad[1] else None, factor if ctx.needs_input_grad[0] else None
            )
            ctx.save_for_forward(input, factor)
        else:
            ctx.number = factor

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None, None, None
        input, factor = (None, ctx.number) if ctx.number is not None else ctx.saved_tensors
        if all(ctx.needs_input_grad[:2]):
            needs = [True, True, False, False]
            grad_input, grad_factor = scale_add_backward(grad, input, None, (), factor, None, needs, ctx.dim)
            return _like(grad_input, ctx.dtype), grad_factor, None
        grad_input = grad_factor = None
        if ctx.needs_input_grad[0]:
            grad_input = _like(scale(grad, _conj(factor), ctx.dim), ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_factor = scale_backward_factor(grad, input, _template(*ctx.factor), ctx.dim)
        return grad_input, grad_factor, None

    @staticmethod
    def jvp(ctx, input_tangent, factor_tangent, _):
        input, factor = (None, ctx.number) if ctx.number is not None else ctx.saved_tensors
        by_input = by_factor = None
        if input_tangent is not None:
            by_input = scale(input_tangent, factor, ctx.dim)
        if factor_tangent is not None:
            by_factor = scale(input, factor_tangent, ctx.dim)
        return _sum(by_input, by_factor)


class ScaleBackwardFactor(Function):
    @staticmethod
    def forward(grad, input, factor, dim):
        return scale_backward_factor.kernel(grad, input, factor, dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        grad, input, factor, ctx.dim = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad, input)
        ctx.save_for_forward(grad, input, factor)

    @staticmethod
    def backward(ctx, grad_output):
        if grad_output is None:
            return None, None, None, None
        grad, input = ctx.saved_tensors
        by_grad = by_input = None
        if ctx.needs_input_grad[0]:
            by_grad = _like(scale(input, grad_output, ctx.dim), grad.dtype)
        if ctx.needs_input_grad[1]:
            by_input = _like(scale(grad, grad_output.conj(), ctx.dim), input.dtype)
        return by_grad, by_input, None, None

    @staticmethod
    def jvp(ctx, grad_tangent, input_tangent, factor_tangent, _):
        grad, input, factor = ctx.saved_tensors
        by_grad = by_input = None
        if grad_tangent is not None:
            by_grad = scale_backward_factor(grad_tangent, input, factor, ctx.dim)
        if input_tangent is not None:
            by_input = scale_backward_factor(grad, input_tangent, factor, ctx.dim)
        if by_grad is None and by_input is None:
            return torch.zeros_like(factor)  # which gives the result's shape only
        return _sum(by_grad, by_input)


class AddScalar(Function):
    @staticmethod
    def forward(input, value, dim):
        return add_scalar.kernel(input, value, dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, value, ctx.dim = inputs
        ctx.dtype, ctx.output = input.dtype, (output.shape, output.dtype)
        ctx.set_materialize_grads(False)
        if isinstance(value, Tensor):
            ctx.value = (value.shape, value.dtype, value.device)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None, None, None
        grad_input = grad_value = None
        if ctx.needs_input_grad[0]:
            grad_input = _like(grad, ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_value = add_scalar_backward_value(grad, _template(*ctx.value), ctx.dim)
        return grad_input, grad_value, None

    @staticmethod
    def jvp(ctx, input_tangent, value_tangent, _):
        shape, dtype = ctx.output
        by_input = by_value = None
        if input_tangent is not None:
            by_input = input_tangent.to(dtype)
        if value_tangent is not None:
            by_value = _expand(value_tangent, shape, ctx.dim).to(dtype)
        return by_input.clone() if by_value is None else _sum(by_input, by_value).clone()


class AddScalarBackwardValue(Function):
    @staticmethod
    def forward(grad, value, dim):
        return add_scalar_backward_value.kernel(grad, value, dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        grad, value, ctx.dim = inputs
        ctx.grad = (grad.shape, grad.dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_forward(value)

    @staticmethod
    def backward(ctx, grad_output):
        if grad_output is None:
            return None, None, None
        shape, dtype = ctx.grad
        return _expand(grad_output, shape, ctx.dim).to(dtype), None, None

    @staticmethod
    def jvp(ctx, grad_tangent, value_tangent, _):
        (value,) = ctx.saved_tensors  # which gives the result's shape only
        if grad_tangent is None:
            return torch.zeros_like(value)
        return add_scalar_backward_value(grad_tangent, value, ctx.dim)


class ReLU(Function):
    @staticmethod
    def forward(input):
        return relu.kernel(input)

    @staticmethod
    def setup_context(ctx, inputs, output):
        # The output, not the input: the next layer keeps it anyway, and the input may be overwritten.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, grad):
        (result,) = ctx.saved_tensors
        return None if grad is None else relu_backward(grad, result)

    @staticmethod
    def jvp(ctx, input_tangent):
        (result,) = ctx.saved_tensors
        return relu_backward(input_tangent, result)


class ReLUBackward(Function):
    """Linear in grad; its derivative by result is zero wherever there is one."""

    @staticmethod
    def forward(grad, result):
        return relu_backward.kernel(grad, result)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, result = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(result)
        ctx.save_for_forward(result)

    @staticmethod
    def backward(ctx, grad_output):
        (result,) = ctx.saved_tensors
        if grad_output is None:
            return None, None
        # Zeros and not None, as in stock PyTorch: torch.autograd.grad raises for an input that it does not reach.
        return relu_backward(grad_output, result), torch.zeros_like(result) if ctx.needs_input_grad[1] else None

    @staticmethod
    def jvp(ctx, grad_tangent, result_tangent):
        (result,) = ctx.saved_tensors
        return torch.zeros_like(result) if grad_tangent is None else relu_backward(grad_tangent, result)


class ScaleAdd(Function):
    """All gradients in one pass."""

    @staticmethod
    def forward(input, factor, value, residual, dim):
        return scale_add.kernel(input, factor, value, residual, dim)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, factor, value, _, ctx.dim = inputs
        output, mask = output if isinstance(output, tuple) else (output, None)
        ctx.dtype, ctx.strides = input.dtype, () if mask is None else output.stride()
        ctx.number = None if isinstance(factor, Tensor) else factor
        ctx.factor = None if ctx.number is not None else (factor.shape, factor.dtype, factor.device)
        ctx.value = (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else None
        ctx.save_for_backward(
            input if ctx.needs_input_grad[1] else None,  # no other derivative depends on it
            mask,
            factor if ctx.needs_input_grad[0] and ctx.number is None else None,
        )

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None, None, None, None, None
        input, mask, factor = ctx.saved_tensors
        if factor is None:
            factor = _template(*ctx.factor) if ctx.number is None else ctx.number
        needs = list(ctx.needs_input_grad[:4])
        value = _template(*ctx.value) if needs[2] else None
        gradients = iter(scale_add_backward(grad, input, mask, ctx.strides, factor, value, needs, ctx.dim))
        by_input, by_factor, by_value, by_residual = (next(gradients) if need else None for need in needs)
        if by_input is not None:
            by_input = _like(by_input, ctx.dtype)
            if grad.is_complex() and not torch.result_type(by_input, factor).is_complex:
                by_input = by_input.clone()  # no view of what is twice as large, since stock's product was real
        if by_residual is not None:
            by_residual = _like(by_residual, ctx.dtype)
        return by_input, by_factor, by_value, by_residual, None


class ScaleAddReLU(ScaleAdd):
    @staticmethod
    def forward(input, factor, value, residual, dim):
        return scale_add_relu_masked.kernel(input, factor, value, residual, dim)


scale = Transformable("scale", Scale, saves_input=True)
scale_backward_factor = Transformable("scale_backward_factor", ScaleBackwardFactor)
add_scalar = Transformable("add_scalar", AddScalar)
add_scalar_backward_value = Transformable("add_scalar_backward_value", AddScalarBackwardValue)
relu = Transformable("relu", ReLU)
relu_backward = Transformable("relu_backward", ReLUBackward)
scale_add = Operator("scale_add", ScaleAdd, saves_input=True)
scale_add_relu = Operator("scale_add_relu", ScaleAddReLU, saves_input=True)
scale_add_backward = Operator("scale_add_backward")
scale_add_relu_masked = Operator("scale_add_relu_masked")

OPERATORS = (
    scale,
    scale_backward_factor,
    add_scalar,
    add_scalar_backward_value,
    relu,
    relu_backward,
    scale_add,
    scale_add_relu,
    scale_add_relu_masked,
    scale_add_backward,
)
