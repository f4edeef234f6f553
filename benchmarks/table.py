"""What is measured: the operators of tests/cases.py, in which forms, sizes, dtypes and layouts. One row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import cases
import torch
from cases import OPS, Op, data
from torch import Tensor

from my_cuda_op import functional

NUMBERS = {"factor": 0.7, "value": 0.3}


@dataclass(frozen=True)
class Form:
    """An operator with one kind of parameters. It is called with the tuple that ``make`` gives."""

    name: str
    op: Op
    parameters: str = "number"  # or "channel": fixed tensors; or "learnable": tensors that get their gradients
    dim: int = 1
    parameter_dtype: torch.dtype | None = None  # of tensors; the input's where it is not given
    residual: bool = False
    reads: tuple[str, ...] = ()  # what backward must read beside the gradient: "input", "output", "bits" (1 an element)
    writes: int = 1  # tensors of the input's size that backward must write; 0 where the gradient is the incoming one
    function: Callable[..., Tensor] | None = None  # ours, where it is not the op itself that computes this
    gradient: Callable[[Tensor, Tensor], Tensor] | None = None  # stock expression of the input's, of (grad, output)
    compile: bool = False  # is torch.compile a peer? It takes seconds for each row.

    def make(self, input: Tensor) -> tuple:
        """The arguments: this input, the parameters, and the residual where there is one."""
        parameters = [NUMBERS[name] for name in self.op.parameters]
        if self.parameters != "number":
            dtype = self.parameter_dtype or input.dtype
            parameters = [data((input.size(self.dim),), dtype, input.device) for _ in parameters]
        residual = [torch.empty_like(input).normal_()] if self.residual else []
        if self.has_backward:
            for tensor in (input, *residual, *(parameters if self.parameters == "learnable" else [])):
                tensor.requires_grad_()
        return (input, *parameters, *residual)

    @property
    def has_backward(self) -> bool:
        """Is there work in backward?"""
        return self.writes > 0 or self.parameters == "learnable"

    def ours(self, *args) -> Tensor:
        return self._call(self.function or self.op, args)

    def stock(self, *args) -> Tensor:
        return self._call(self.op.stock, args)

    def expected(self, *args) -> Tensor:
        return self._call(self.op.expected, args)

    def _call(self, function, args):
        if self.residual:
            *args, residual = args
            return function(*args, dim=self.dim, residual=residual)
        return function(*args, dim=self.dim)

    def bytes_moved(self, args: tuple, output: Tensor, grad: Tensor) -> dict[str, int]:
        """The least that any implementation must read and write."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        sizes = {"input": size(args[0]), "output": size(output), "bits": output.numel() // 8}
        forward = sum(map(size, tensors)) + size(output)
        backward = size(grad) + sum(sizes[name] for name in self.reads)
        backward += self.writes * args[0].numel() * args[0].element_size()
        written = sizes["bits"] if "bits" in self.reads else 0  # by a forward that expects a backward
        return {"forward": forward, "backward": backward, "step": forward + written + backward}


def size(tensor: Tensor) -> int:
    """Bytes of the elements that differ in address: what is expanded counts once."""
    elements = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= length if stride else 1
    return elements * tensor.element_size()


def _relu_gradient(grad, output):
    return torch.where(output <= 0, 0, grad)


SCALE_ADD_RELU = OPS["scale_add_relu"]
# torch.relu(x + b), which is scale_add_relu with a factor of 1.
ADD_RELU = replace(OPS["add_scalar"], formula=lambda x, b: torch.relu(x + b))

RELU = Form("relu", OPS["relu"], reads=("output",), gradient=_relu_gradient)

# At every size, contiguous.
BY_SIZE = [
    Form("scale", OPS["scale"]),
    Form("add_scalar", OPS["add_scalar"], writes=0),
    RELU,
    Form(
        "relu, one bit",
        OPS["relu"],
        reads=("bits",),
        function=lambda x, dim: functional.scale_add_relu(x, 1, 0),
        compile=True,
    ),
    Form("scale_add_relu", SCALE_ADD_RELU, reads=("bits",), compile=True),
]
# With one number for each channel of NCHW, in both memory formats.
BY_CHANNEL = [
    Form("scale, per channel", OPS["scale"], "channel"),
    Form("scale, learnable", OPS["scale"], "learnable", reads=("input",)),
    Form("add_scalar, learnable", OPS["add_scalar"], "learnable", writes=0),
]
FUSED_BY_CHANNEL = [
    Form("scale_add_relu, per channel", SCALE_ADD_RELU, "channel", reads=("bits",), compile=True),
    Form("scale_add_relu, residual", SCALE_ADD_RELU, "channel", residual=True, reads=("bits",), writes=2),
    Form("scale_add_relu, learnable", SCALE_ADD_RELU, "learnable", reads=("input", "bits"), compile=True),
]
# With one number for each element of the last dimension of (batch, tokens, features).
BY_FEATURE = [
    Form("scale, learnable (LayerScale)", OPS["scale"], "learnable", dim=-1, reads=("input",), compile=True),
    Form("add_scalar, learnable (bias)", OPS["add_scalar"], "learnable", dim=-1, writes=0),
]
FUSED_BY_FEATURE = [
    Form(
        "scale_add_relu, learnable value (bias)",
        ADD_RELU,
        "learnable",
        dim=-1,
        reads=("bits",),
        function=lambda x, b, dim: functional.scale_add_relu(x, 1, b, dim=dim),
        compile=True,
    ),
]
# A block of a frozen network under autocast: half-precision activations meet parameters that are not.
AUTOCAST = Form(
    "scale_add_relu, residual, float32 parameters",
    SCALE_ADD_RELU,
    "channel",
    parameter_dtype=torch.float32,
    residual=True,
    reads=("bits",),
    writes=2,
    compile=True,
)


def _chunk(shape, dtype, device):
    return data([*shape[:-1], 2 * shape[-1]], dtype, device)[..., : shape[-1]]


def _every_second_row(shape, dtype, device):
    return data([shape[0], 2 * shape[1], *shape[2:]], dtype, device)[:, ::2]


def _transposed(shape, dtype, device):
    return data([*shape[:-2], shape[-1], shape[-2]], dtype, device).mT


def _transposed_slice(shape, dtype, device):
    return data([shape[0], shape[2] + 1, shape[1]], dtype, device)[:, 1:].mT


def _channel_slice(memory_format):
    def make(shape, dtype, device):
        wide = data([shape[0], 2 * shape[1], *shape[2:]], dtype, device)
        return wide.contiguous(memory_format=memory_format)[:, : shape[1]]

    return make


CONTIGUOUS = {"contiguous": cases.LAYOUTS["contiguous"]}
IMAGES = {**CONTIGUOUS, "channels_last": cases.LAYOUTS["channels_last"]}
# Of an input (batch, tokens, features), by how one comes by it.
LAYOUTS = {
    "flat[1:]": cases.LAYOUTS["misaligned"],
    "x[:, 1:]": cases.LAYOUTS["outer_slice"],
    "x[..., :C]": _chunk,
    "x[:, ::2]": _every_second_row,
    "x[..., ::2]": cases.LAYOUTS["every_second"],
    "x.mT": _transposed,
    "x[:, 1:].mT": _transposed_slice,
    "x.expand": cases.LAYOUTS["expanded_leading"],
}
IMAGE_LAYOUTS = {
    "channels_last": cases.LAYOUTS["channels_last"],
    "x[:, :C] NCHW": _channel_slice(torch.contiguous_format),
    "x[:, :C] channels_last": _channel_slice(torch.channels_last),
}
# Of an incoming gradient, by what came after the operator.
GRADIENTS = {
    "sum()": cases.LAYOUTS["expanded"],
    "mean(0)": cases.LAYOUTS["expanded_leading"],
    "mean(-1)": cases.LAYOUTS["expanded_trailing"],
    "cat": _chunk,
    "mT": _transposed,
}

SIZE_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EXPONENTS = {"cuda": (10, 13, 16, 19, 22, 25, 27, 28), "cpu": (10, 13, 16, 19, 22, 25)}
COMPILED = {"cuda": 27, "cpu": 25}  # the one size at which torch.compile is a peer
TOKENS = {"cuda": (64, 1024, 768), "cpu": (4, 256, 768)}
IMAGE = {"cuda": (64, 256, 56, 56), "cpu": (2, 64, 56, 56)}


@dataclass(frozen=True)
class Case:
    """A row: one form on one input, in one or more of the directions forward, backward and step (both)."""

    group: str
    form: Form
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str
    layouts: dict[str, Callable]  # where `layout` stands
    directions: tuple[str, ...]
    compile: bool = False

    def id(self, direction: str) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.form.name} {direction} {dtype} {self.layout} {'x'.join(map(str, self.shape))}"

    def make(self, device: str) -> tuple:
        layout = CONTIGUOUS["contiguous"] if self.group == "gradients" else self.layouts[self.layout]
        return self.form.make(layout(self.shape, self.dtype, device))

    def make_grad(self, output: Tensor) -> Tensor:
        if self.group == "gradients":
            return self.layouts[self.layout](output.shape, output.dtype, output.device)
        return torch.empty_like(output).normal_()


def rows(device: str, quick: bool) -> list[Case]:
    """The table. ``quick`` leaves out most sizes and dtypes, and torch.compile."""
    table = []
    every = ("forward", "backward", "step")
    for form in BY_SIZE:
        for dtype in SIZE_DTYPES[:2] if quick else SIZE_DTYPES:
            for exponent in (10, 16, 22) if quick else EXPONENTS[device]:
                if dtype == torch.float64 and exponent < 22:
                    continue
                directions = [d for d in every if d == "forward" or form.has_backward]
                if exponent < 25:
                    directions = directions[:2]  # a step is the two together
                compile = exponent == COMPILED[device] and dtype in (torch.float32, *[torch.bfloat16] * form.compile)
                case = Case("sizes", form, dtype, (2**exponent,), "contiguous", CONTIGUOUS, tuple(directions), compile)
                table.append(case)
    for dtype in [torch.float32] if quick else [torch.float32, torch.bfloat16]:
        for layouts, shape in (LAYOUTS, TOKENS[device]), (IMAGE_LAYOUTS, IMAGE[device]):
            table += [Case("layouts", RELU, dtype, shape, name, layouts, ("forward",), True) for name in layouts]
        for name in GRADIENTS:
            table.append(Case("gradients", RELU, dtype, TOKENS[device], name, GRADIENTS, ("backward",), True))
        for group, forms, layouts, shape in (
            ("channels", BY_CHANNEL, IMAGES, IMAGE[device]),
            ("channels", BY_FEATURE, CONTIGUOUS, TOKENS[device]),
            ("fused", FUSED_BY_CHANNEL, IMAGES, IMAGE[device]),
            ("fused", FUSED_BY_FEATURE, CONTIGUOUS, TOKENS[device]),
        ):
            for f in forms:
                table += [Case(group, f, dtype, shape, name, layouts, every, f.compile) for name in layouts]
    table.append(Case("fused", AUTOCAST, torch.bfloat16, IMAGE[device], "channels_last", IMAGES, every, True))
    return [replace(case, compile=False) for case in table] if quick else table
