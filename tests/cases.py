"""One table of the operators, and what they are called with. Tests and benchmarks iterate it; it is plain data.

for op in OPS.values():            # op(x, 2.0), op(x, 2.0, inplace=True), op.stock(x, 2.0), op.expected(x, 2.0)
    for name in LAYOUTS:           # make_input(name, torch.float32, "cpu"): a tensor of SHAPE in that layout
        for kind in PARAMETERS:    # make_parameters(op, kind, x): numbers or tensors, as many as the op has
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from my_cuda_op import functional, reference

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex128, torch.complex64]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *COMPLEX, *INTS, torch.bool]
BAREBONES = [torch.uint16, torch.uint32, torch.uint64, torch.complex32]  # for which stock has few operators
COMPUTE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


@dataclass(frozen=True)
class Op:
    """One operator: a row of the table."""

    name: str
    parameters: tuple[str, ...]
    formula: Callable[..., Tensor]  # the stock expression, of an input and parameters that broadcast against it
    formula_: Callable[..., Tensor]  # the same in place
    takes: Callable[[torch.dtype], bool]  # does the stock expression take a result of this dtype?

    @property
    def recorded(self) -> str:
        """The dispatcher's operator that runs where a derivative is recorded."""
        return self.name + "_masked" if hasattr(torch.ops.my_cuda_op, self.name + "_masked") else self.name

    @property
    def rounds_once(self) -> bool:
        """Unlike the stock expression, which rounds after each of its steps."""
        return len(self.parameters) > 1

    def tolerance(self, dtype: torch.dtype) -> dict:
        """How far a result of this dtype may be from the stock expression's, of numbers below 100."""
        if self.name == "add_scalar" or not self.parameters or not (dtype.is_floating_point or dtype.is_complex):
            return {}
        if not self.rounds_once and not dtype.is_complex:
            return {}
        # A step's rounding, or one term of a complex product, may cancel: so the error is absolute.
        eps = torch.finfo(torch.float32 if dtype == torch.complex32 else COMPUTE.get(dtype, dtype)).eps
        return {"rtol": 4 * torch.finfo(dtype).eps, "atol": 128 * eps}

    def strides(self, stock: Tensor, actual: Tensor) -> tuple:
        """Stock's; but of dimensions along which there is at most one element, a chain of stock operators gives the
        strides that come out of each of its steps, and we those of one step."""
        if not self.rounds_once:
            return stock.stride()
        sizes = zip(stock.shape, stock.stride(), actual.stride(), strict=True)
        return tuple(ours if size <= 1 or stock.numel() == 0 else its for size, its, ours in sizes)

    # Looked up at each call, so that a test may replace them.
    @property
    def function(self) -> Callable[..., Tensor]:
        return getattr(functional, self.name)

    @property
    def function_(self) -> Callable[..., Tensor]:
        return getattr(functional, self.name + "_")

    @property
    def reference(self) -> Callable[..., Tensor]:
        return getattr(reference, self.name)

    def __call__(self, input, *parameters, dim=1, inplace=False, **residual):
        """Ours: ``my_cuda_op.functional.<name>``, with ``dim`` where the op has one, and ``residual`` if given."""
        function = self.function_ if inplace else self.function
        return function(input, *parameters, **({"dim": dim} if parameters else {}), **residual)

    def stock(self, input, *parameters, dim=1, inplace=False, **residual):
        """The stock expression as a user would write it: fixes strides, gradients' strides and errors."""
        formula = self.formula_ if inplace else self.formula
        return formula(input, *[as_channels(parameter, input, dim) for parameter in parameters], **residual)

    def result_type(self, input, *parameters) -> torch.dtype:
        """A parameter never widens, whatever its shape: it counts as a 0-d tensor."""
        numbers = [torch.empty((), dtype=p.dtype) if isinstance(p, Tensor) else p for p in parameters]
        types = [torch.result_type(input, number) for number in numbers]
        return functools.reduce(torch.promote_types, types) if types else input.dtype

    def expected(self, input, *parameters, dim=1, **residual):
        """What the contract promises, without a look at our code: the stock expression, with half precision computed in
        float32 and rounded once, and with parameters that never widen. Differentiable."""
        dtype = self.result_type(input, *parameters)
        compute = COMPUTE.get(dtype, dtype)
        parameters = [as_channels(p, input, dim) for p in parameters]
        parameters = [p.to(compute) if isinstance(p, Tensor) else p for p in parameters]
        residual = {name: tensor.to(compute) for name, tensor in residual.items()}
        return self.formula(input.to(compute), *parameters, **residual).to(dtype)


def as_channels(parameter, input, dim):
    if not isinstance(parameter, Tensor):
        return parameter
    if parameter.numel() == 1:
        return parameter.reshape(())
    return parameter.view([-1 if d == dim % input.dim() else 1 for d in range(input.dim())])


# What torch 2.14 makes of bfloat16 and a complex number: a dtype in which it computes nothing yet.
BCOMPLEX32 = getattr(torch, "bcomplex32", None)


def _relu_takes(dtype):
    return not dtype.is_complex and dtype not in (torch.bool, torch.uint16, torch.uint32, torch.uint64)


def _scale_add(x, w, b, residual=None):
    output = x * w + b
    return output if residual is None else output + residual


_OPS = [
    Op("scale", ("factor",), lambda x, w: x * w, lambda x, w: x.mul_(w), lambda dtype: dtype != BCOMPLEX32),
    Op(
        "add_scalar",
        ("value",),
        lambda x, b: x + b,
        lambda x, b: x.add_(b),
        lambda dtype: dtype not in (torch.uint16, torch.uint32, torch.uint64, BCOMPLEX32),
    ),
    Op(
        "relu",
        (),
        torch.relu,
        torch.relu_,
        _relu_takes,
    ),
    Op(
        "scale_add",
        ("factor", "value"),
        _scale_add,
        lambda x, w, b: x.mul_(w).add_(b),
        lambda dtype: dtype not in (torch.uint16, torch.uint32, torch.uint64, BCOMPLEX32),
    ),
    Op(
        "scale_add_relu",
        ("factor", "value"),
        lambda *args, **residual: torch.relu(_scale_add(*args, **residual)),
        lambda x, w, b: x.mul_(w).add_(b).relu_(),
        _relu_takes,
    ),
]
OPS = {op.name: op for op in _OPS}


def data(shape, dtype, device="cpu") -> Tensor:
    """Random numbers of either sign, with zeros among them; what a dtype has room for."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, device=device).bool()
    if dtype.is_complex:
        wide = torch.randn(shape, dtype=torch.complex64 if dtype == torch.complex32 else dtype, device=device)
        return wide.to(dtype)
    if dtype.is_floating_point:
        wide = torch.randn(shape, dtype=torch.float64, device=device)
        return torch.where(wide.abs() < 0.1, 0, wide).to(dtype)
    low = -9 if dtype.is_signed else 0
    return torch.randint(low, 10, shape, device=device).to(dtype)


# Layouts. A maker takes (shape, dtype, device) and gives a tensor of that shape.


def _like(shape, order):
    """Random numbers whose dimensions lie in memory in this order, from the slowest to the fastest."""

    def make(dtype, device):
        inverse = [order.index(d) for d in range(len(shape))]
        return data([shape[d] for d in order], dtype, device).permute(inverse)

    return make


def _channels_last(shape, dtype, device):
    return _like(shape, [0, *range(2, len(shape)), 1])(dtype, device)


def _transposed(shape, dtype, device):
    return _like(shape, list(range(len(shape)))[::-1])(dtype, device)


def _permuted(shape, dtype, device):  # channels slowest: neither row- nor column-major
    return _like(shape, [1, *range(2, len(shape)), 0])(dtype, device)


def _misaligned(shape, dtype, device):
    return data([math.prod(shape) + 1], dtype, device)[1:].view(shape)


def _inner_slice(shape, dtype, device):
    return data([*shape[:-1], shape[-1] + 3], dtype, device)[..., : shape[-1]]


def _outer_slice(shape, dtype, device):
    return data([shape[0], shape[1] + 1, *shape[2:]], dtype, device)[:, 1:]


def _every_second(shape, dtype, device):
    return data([*shape[:-1], shape[-1] * 2], dtype, device)[..., ::2]


def _skipped_rows(shape, dtype, device):
    return data([*shape[:-2], shape[-2] * 3, shape[-1]], dtype, device)[..., ::3, :]


def _skipped_transposed(shape, dtype, device):
    return _every_second([*shape[:-2], shape[-1], shape[-2]], dtype, device).transpose(-1, -2)


def _expanded_leading(shape, dtype, device):
    return data([1, *shape[1:]], dtype, device).expand(shape)


def _expanded_trailing(shape, dtype, device):
    return data([*shape[:-1], 1], dtype, device).expand(shape)


def _expanded(shape, dtype, device):
    return data([], dtype, device).expand(shape)


def _negative(shape, dtype, device):
    return torch._neg_view(data(shape, dtype, device))


def _conjugate(shape, dtype, device):
    return data(shape, dtype, device).conj()


LAYOUTS = {
    "contiguous": data,
    "channels_last": _channels_last,
    "transposed": _transposed,
    "permuted": _permuted,
    "misaligned": _misaligned,
    "inner_slice": _inner_slice,
    "outer_slice": _outer_slice,
    "every_second": _every_second,
    "skipped_rows": _skipped_rows,
    "skipped_transposed": _skipped_transposed,
    "expanded_leading": _expanded_leading,
    "expanded_trailing": _expanded_trailing,
    "expanded": _expanded,
    "negative": _negative,
    "conjugate": _conjugate,
}
SHAPE = (3, 5, 7, 11)  # no two alike, and no multiple of a vector


def has_layout(name, dtype) -> bool:
    """Is there such a tensor of this dtype?"""
    if name == "conjugate":
        return dtype.is_complex
    return name != "negative" or dtype.is_floating_point or dtype.is_complex


# Shapes that need no other layout, as makers that take (dtype, device).
SHAPES = {
    "0-d": lambda *a: data((), *a),
    "one element": lambda *a: data((1,), *a),
    "empty": lambda *a: data((0,), *a),
    "empty, no rows": lambda *a: data((0, 5, 3), *a),
    "empty, no columns": lambda *a: data((2, 5, 0), *a),
    "empty, transposed": lambda *a: data((3, 5, 0, 2), *a).permute(3, 1, 0, 2),
    "1-d": lambda *a: data((1031,), *a),  # a few vectors, a few blocks, and a tail
    "2-d": lambda *a: data((129, 5), *a),
    "channels_last of one channel": lambda *a: data((2, 1, 3, 4), *a).to(memory_format=torch.channels_last),
    "odd strides of size 1": lambda *a: data((60,), *a).as_strided((1, 5, 1, 3), (17, 7, 100, 2)),
    "10-d, nothing to merge": lambda *a: data((3,) * 10, *a)[(slice(2),) * 10],
    "30-d": lambda *a: data((2, 5, *(1,) * 26, 3, 2), *a).transpose(0, -1),
}


def make_input(name, dtype, device="cpu") -> Tensor:
    """A tensor by the name of its layout (of SHAPE) or of its shape."""
    return LAYOUTS[name](SHAPE, dtype, device) if name in LAYOUTS else SHAPES[name](dtype, device)


INPUTS = [*LAYOUTS, *SHAPES]


# Parameters. A maker takes (channels, dtype, device) and gives a number or a tensor.
NUMBERS = {"int": 3, "float": -0.3, "bool": True, "complex": 0.5 - 2j}


def _per_channel(c, dtype, device):
    return data((c,), dtype, device)


PARAMETERS = {
    **{name: (lambda c, dtype, device, number=number: number) for name, number in NUMBERS.items()},
    "0-d": lambda c, dtype, device: data((), dtype, device),
    "(1,)": lambda c, dtype, device: data((1,), dtype, device),
    "(1, 1)": lambda c, dtype, device: data((1, 1), dtype, device),
    "0-d on the CPU": lambda c, dtype, device: data((), dtype, "cpu"),
    "0-d float64": lambda c, dtype, device: data((), torch.float64, device),
    "per channel": _per_channel,
    "per channel, strided": lambda c, dtype, device: data((2 * c,), dtype, device)[::2],
    "per channel, misaligned": lambda c, dtype, device: data((c + 1,), dtype, device)[1:],
    "per channel, expanded": lambda c, dtype, device: data((1,), dtype, device).expand(c),
    "per channel, float32": lambda c, dtype, device: _per_channel(c, torch.float32, device),
    "per channel, float64": lambda c, dtype, device: _per_channel(c, torch.float64, device),
    "per channel, bfloat16": lambda c, dtype, device: _per_channel(c, torch.bfloat16, device),
    "per channel, complex64": lambda c, dtype, device: _per_channel(c, torch.complex64, device),
    "per channel, int": lambda c, dtype, device: _per_channel(c, torch.int64, device),
}


def make_parameters(op, kind, input, dim=1) -> tuple:
    """Parameters of this kind for the op: as many as it has, with input.size(dim) channels and the input's dtype.

    Where the input has no such dimension they have one element.
    """
    channels = input.size(dim) if -input.dim() <= dim < input.dim() else 1
    return tuple(PARAMETERS[kind](channels, input.dtype, input.device) for _ in op.parameters)


# Comparison. torch.testing.assert_close lacks some dtypes, takes -0.0 for 0.0, and does not look at strides.


def assert_same(actual, expected, *, strides=None, rtol=0.0, atol=0.0, signed_zero=True) -> None:
    """The same dtype, shape, strides (where given) and values: every bit, with rtol and atol 0. All NaNs are alike."""
    what = {"dtype": (actual.dtype, expected.dtype), "shape": (actual.shape, expected.shape)}
    what |= {"device": (actual.device, expected.device), "strides": (actual.stride(), strides or actual.stride())}
    for name, (got, must) in what.items():
        assert got == must, f"{name} must be {must}, got {got}"
    actual, expected = _comparable(actual), _comparable(expected)
    if rtol or atol:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
        return
    same = (actual == expected) | ((actual != actual) & (expected != expected))
    if signed_zero and actual.is_floating_point():
        same &= (torch.signbit(actual) == torch.signbit(expected)) | (actual != actual)
    wrong = (~same).flatten().nonzero().flatten().tolist()  # flat: on CUDA nonzero takes 25 dimensions at most
    assert not wrong, (
        f"{len(wrong)} of {same.numel()} elements differ, first the one at {wrong[0]} of shape {tuple(same.shape)}: "
        f"got {actual.flatten()[wrong[0]].item()!r}, expected {expected.flatten()[wrong[0]].item()!r}"
    )


def _comparable(x):
    x = x.detach().resolve_conj().resolve_neg()
    if x.dtype == torch.complex32:
        x = x.to(torch.complex64)
    if x.is_complex():
        return torch.view_as_real(x)
    return x.to(torch.int64) if x.dtype in (torch.uint16, torch.uint32, torch.uint64) else x


def short(error) -> str:
    """One line for a table of failures."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
