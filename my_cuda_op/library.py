"""What the dispatcher's operators get from Python; csrc/library.cpp has their schemas and their kernels."""

from __future__ import annotations

from functools import partial

import torch
from torch.library import impl, register_fake

from my_cuda_op.autograd import OPERATORS

# Where torch.func's transforms take a call, before they split it up by level. There the reference runs, whose
# derivatives and batches are PyTorch's own.
TRANSFORMS = "FuncTorchDynamicLayerFrontMode"


def _overloads(name: str) -> list[str]:
    overloads = getattr(torch.ops.my_cuda_op, name).overloads()
    return [f"my_cuda_op::{name}.{overload}".removesuffix(".default") for overload in overloads]


def _with_defaults(function, reference):
    """The dispatcher leaves out trailing arguments that have their default; a Function wants them all."""
    count, defaults = reference.__code__.co_argcount, reference.__defaults__ or ()
    return lambda *args: function(*args, *defaults[len(defaults) - count + len(args) :])


for operator in OPERATORS:
    for op in _overloads(operator.name):
        impl(op, ["default", TRANSFORMS], operator.reference)  # "default": on devices without kernels
        register_fake(op, operator.reference)
        # Not register_autograd, which knows no jvp and so would silently drop the tangent of a dual number.
        impl(op, "Autograd", _with_defaults(operator.record, operator.reference))
    if operator.kernel_ is not None:
        for op in _overloads(operator.name + "_"):
            in_place = partial(operator.assign, operator.reference)
            impl(op, ["default", TRANSFORMS], in_place)
            register_fake(op, in_place)
