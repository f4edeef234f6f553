"""What the dispatcher's operators get from Python; csrc/library.cpp has their schemas and their kernels."""

from __future__ import annotations

import torch
from torch.library import impl, register_autograd, register_fake, register_vmap

from my_cuda_op.autograd import OPERATORS
from my_cuda_op.reference import store


def _overloads(name: str) -> list[str]:
    overloads = getattr(torch.ops.my_cuda_op, name).overloads()
    return [f"my_cuda_op::{name}.{overload}".removesuffix(".default") for overload in overloads]


def _in_place(operator):
    def run(input, *args, **kwargs):
        store(operator.name, input, operator.reference(input, *args, **kwargs))

    return run


for operator in OPERATORS:
    for op in _overloads(operator.name):
        impl(op, "default", operator.reference)  # on devices without kernels
        register_fake(op, operator.reference)
        register_autograd(op, operator.function.backward, setup_context=operator.function.setup_context)
        register_vmap(op, operator.function.vmap)
    if operator.kernel_ is not None:
        for op in _overloads(operator.name + "_"):
            impl(op, "default", _in_place(operator))
            register_fake(op, _in_place(operator))
