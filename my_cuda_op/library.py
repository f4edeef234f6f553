"""What the dispatcher's operators get from Python; csrc/library.cpp has their schemas and their kernels."""

from __future__ import annotations

from torch.library import impl, register_autograd, register_fake, register_vmap

from my_cuda_op import autograd


def _in_place(reference):
    def run(input, *args, **kwargs):
        input.copy_(reference(input, *args, **kwargs))

    return run


def _register(name: str, operator: autograd.Operator) -> None:
    op = f"my_cuda_op::{name}"
    impl(op, "default", operator.reference)  # on devices without kernels
    register_fake(op, operator.reference)
    register_autograd(op, operator.function.backward, setup_context=operator.function.setup_context)
    register_vmap(op, operator.function.vmap)


def _register_in_place(name: str, operator: autograd.Operator) -> None:
    op = f"my_cuda_op::{name}"
    impl(op, "default", _in_place(operator.reference))
    register_fake(op, _in_place(operator.reference))


for overload in ("", ".Tensor"):
    _register("scale" + overload, autograd.scale)
    _register_in_place("scale_" + overload, autograd.scale)
    _register("add_scalar" + overload, autograd.add_scalar)
    _register_in_place("add_scalar_" + overload, autograd.add_scalar)
_register("scale_backward_factor", autograd.scale_backward_factor)
_register("add_scalar_backward_value", autograd.add_scalar_backward_value)
_register("relu", autograd.relu)
_register_in_place("relu_", autograd.relu)
_register("relu_backward", autograd.relu_backward)
