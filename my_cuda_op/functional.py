"""The operators as functions, in the manner of ``torch.nn.functional``.

Shapes, dtypes, strides, gradients and errors are those of the stock expression that each docstring gives, with these
differences (rarer ones are in README.md):

* float16 and bfloat16 are computed in float32, with the parameter in float32, and rounded once.
* A parameter never widens a floating-point input, whatever its shape: the result has the dtype
  ``torch.result_type(input, parameter as a number)``. So a bfloat16 activation stays bfloat16 beside float32
  parameters. A complex parameter makes the result complex.

A *parameter* (``factor``, ``value``) is one of

* a Python or NumPy number;
* a tensor of one element;
* a tensor of shape ``(input.size(dim),)``: one number for each channel. ``dim=1`` is the channel dimension of NCHW and
  (N, C), as in BatchNorm; ``dim=-1`` suits LayerScale. ``dim`` is not looked at otherwise.

A tensor parameter gets its gradient, in its own shape and dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function, has_torch_function_unary

from my_cuda_op import autograd
from my_cuda_op._C import plain  # the shortest way to a kernel; None where the call is not as simple as that

Number = int | float | complex | bool
Parameter = Tensor | Number

__all__ = [
    "add_scalar",
    "add_scalar_",
    "relu",
    "relu_",
    "scale",
    "scale_",
    "scale_add",
    "scale_add_",
    "scale_add_relu",
    "scale_add_relu_",
]


def scale(input: Tensor, factor: Parameter, *, dim: int = 1, inplace: bool = False) -> Tensor:
    """Multiply by a factor: ``input * factor``.

    Equivalent to ``input * factor``, with a factor of one number for each channel viewed as ``(C, 1, 1)`` (for NCHW).

    Args:
        input: any shape; every dtype that ``torch.mul`` takes.
        factor: a number, a tensor of one element, or one of shape ``(input.size(dim),)``.
        dim: the channel dimension.
        inplace: overwrite the input, and return it.

    Raises:
        TypeError: ``input`` is not a tensor, ``factor`` neither a number nor a tensor, or ``dim`` not an int.
        OverflowError: ``factor`` is an int that does not fit into 64 bits.
        IndexError: ``dim`` is not a dimension of the input.
        RuntimeError: ``factor`` has another number of elements or is on another device; in place: the input is a leaf
            that requires grad, overlaps itself in memory, or cannot hold the result's dtype.
    """
    if not inplace and not is_compiling() and (output := plain.scale(input, factor, dim)) is not None:
        return output
    if has_torch_function((input, factor)):
        return handle_torch_function(scale, (input, factor), input, factor, dim=dim, inplace=inplace)
    run = autograd.scale.in_place if inplace else autograd.scale
    return run(_tensor("scale", input), check_parameter("scale", "factor", factor), _dim("scale", dim))


def add_scalar(input: Tensor, value: Parameter, *, dim: int = 1, inplace: bool = False) -> Tensor:
    """Add a value: ``input + value``.

    Equivalent to ``input + value``, with a value of one number for each channel viewed as ``(C, 1, 1)`` (for NCHW).

    Args:
        input: any shape; every dtype that ``torch.add`` takes.
        value: a number, a tensor of one element, or one of shape ``(input.size(dim),)``.
        dim: the channel dimension.
        inplace: overwrite the input, and return it.

    Raises:
        TypeError, OverflowError, IndexError, RuntimeError: as :func:`scale`.
    """
    if not inplace and not is_compiling() and (output := plain.add_scalar(input, value, dim)) is not None:
        return output
    if has_torch_function((input, value)):
        return handle_torch_function(add_scalar, (input, value), input, value, dim=dim, inplace=inplace)
    run = autograd.add_scalar.in_place if inplace else autograd.add_scalar
    return run(_tensor("add_scalar", input), check_parameter("add_scalar", "value", value), _dim("add_scalar", dim))


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """The larger of the input and 0. NaN stays NaN; the sign of ``relu(-0.0)`` is not specified.

    Equivalent to ``torch.relu(input)``. Saves its output for backward, which the next layer usually keeps anyway;
    ``scale_add_relu(input, 1, 0)`` is the same with one bit saved for each element.

    Args:
        input: any shape; every dtype that ``torch.relu`` takes (not bool, not complex).
        inplace: overwrite the input, and return it.

    Raises:
        TypeError: ``input`` is not a tensor.
        RuntimeError: ``input`` is complex or bool; in place: as :func:`scale`.
    """
    if not inplace and not is_compiling() and (output := plain.relu(input)) is not None:
        return output
    if has_torch_function_unary(input):
        return handle_torch_function(relu, (input,), input, inplace=inplace)
    run = autograd.relu.in_place if inplace else autograd.relu
    return run(_tensor("relu", input))


def scale_add(
    input: Tensor,
    factor: Parameter,
    value: Parameter,
    *,
    residual: Tensor | None = None,
    dim: int = 1,
    inplace: bool = False,
) -> Tensor:
    """Multiply by a factor, add a value, and add a residual, in one pass: ``input * factor + value + residual``.

    Equivalent to ``input * factor + value``, and ``+ residual`` where that is given, computed without rounding in
    between. Backward is one pass too, whichever of the arguments need a gradient. It saves the input where the factor
    needs one, and no other tensor of its size.

    Args:
        input: any shape; every dtype that ``torch.add`` takes.
        factor, value: each a number, a tensor of one element, or one of shape ``(input.size(dim),)``.
        residual: a tensor of the input's shape and dtype, in any layout.
        dim: the channel dimension, of both parameters.
        inplace: overwrite the input, and return it.

    Raises:
        TypeError, OverflowError, IndexError, RuntimeError: as :func:`scale`.
        TypeError: ``residual`` is neither a tensor nor None.
        RuntimeError: ``residual`` has another shape, dtype or device than the input.
    """
    if not inplace and not is_compiling():
        output = plain.scale_add(input, factor, value, residual, dim)
        if output is not None:
            return output
    return _affine(scale_add, autograd.scale_add, input, factor, value, residual, dim, inplace)


def scale_add_relu(
    input: Tensor,
    factor: Parameter,
    value: Parameter,
    *,
    residual: Tensor | None = None,
    dim: int = 1,
    inplace: bool = False,
) -> Tensor:
    """The larger of :func:`scale_add` and 0, in one pass.

    Equivalent to ``torch.relu(input * factor + value)``, with ``+ residual`` where that is given, computed without
    rounding in between. Saves one bit for each element for backward, and the input where the factor needs a gradient.

    Args:
        input: any shape; every dtype that ``torch.relu`` takes.
        factor, value, residual, dim, inplace: as for :func:`scale_add`.

    Raises:
        TypeError, OverflowError, IndexError, RuntimeError: as :func:`scale_add` and :func:`relu`.
    """
    if not inplace and not is_compiling():
        output = plain.scale_add_relu(input, factor, value, residual, dim)
        if output is not None:
            return output
    return _affine(scale_add_relu, autograd.scale_add_relu, input, factor, value, residual, dim, inplace)


def _affine(function, operator, input, factor, value, residual, dim, inplace):
    tensors = (input, factor, value, residual)
    if has_torch_function(tensors):
        options = {"residual": residual, "dim": dim, "inplace": inplace}
        return handle_torch_function(function, tensors, input, factor, value, **options)
    if residual is not None and not isinstance(residual, Tensor):
        raise TypeError(f"{operator.name}: residual must be a Tensor or None, got {type(residual).__name__}")
    factor = check_parameter(operator.name, "factor", factor)
    value = check_parameter(operator.name, "value", value)
    run = operator.in_place if inplace else operator
    return run(_tensor(operator.name, input), factor, value, residual, _dim(operator.name, dim))


def scale_(input: Tensor, factor: Parameter, *, dim: int = 1) -> Tensor:
    """:func:`scale` in place: ``input.mul_(factor)``."""
    return scale(input, factor, dim=dim, inplace=True)


def add_scalar_(input: Tensor, value: Parameter, *, dim: int = 1) -> Tensor:
    """:func:`add_scalar` in place: ``input.add_(value)``."""
    return add_scalar(input, value, dim=dim, inplace=True)


def relu_(input: Tensor) -> Tensor:
    """:func:`relu` in place: ``torch.relu_(input)``."""
    return relu(input, inplace=True)


def scale_add_(
    input: Tensor, factor: Parameter, value: Parameter, *, residual: Tensor | None = None, dim: int = 1
) -> Tensor:
    """:func:`scale_add` in place."""
    return scale_add(input, factor, value, residual=residual, dim=dim, inplace=True)


def scale_add_relu_(
    input: Tensor, factor: Parameter, value: Parameter, *, residual: Tensor | None = None, dim: int = 1
) -> Tensor:
    """:func:`scale_add_relu` in place."""
    return scale_add_relu(input, factor, value, residual=residual, dim=dim, inplace=True)


def _tensor(op: str, input: Any) -> Tensor:
    if not isinstance(input, Tensor):
        raise TypeError(f"{op}: input must be a Tensor, got {type(input).__name__}")
    return input


def _dim(op: str, dim: Any) -> int:
    if not isinstance(dim, int) and not hasattr(dim, "__index__"):  # as a NumPy integer has
        raise TypeError(f"{op}: dim must be an int, got {type(dim).__name__}")
    return dim


_NUMBERS = (Tensor, float, int, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


def check_parameter(op: str, name: str, parameter: Any) -> Parameter:
    """The parameter as a tensor or a Python number; TypeError for anything else."""
    if type(parameter).__module__ == "numpy" and getattr(parameter, "shape", None) == () and hasattr(parameter, "item"):
        parameter = parameter.item()  # a NumPy number, as the Python number it is
        if type(parameter).__module__ == "numpy":  # wider than any
            parameter = complex(parameter) if parameter.dtype.kind == "c" else float(parameter)
    if isinstance(parameter, int) and not -(2**63) <= parameter < 2**63:
        raise OverflowError(f"{op}: {name} must fit into 64 bits, got {parameter}")
    if not isinstance(parameter, _NUMBERS):
        raise TypeError(f"{op}: {name} must be a number or a Tensor, got {type(parameter).__name__}")
    return parameter
