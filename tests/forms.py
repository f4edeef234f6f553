"""Every operator in every form that a call can have: what the tests of autograd, compile, nn and modes iterate."""

from __future__ import annotations

import pytest
import torch
from cases import OPS, data, make_parameters

KINDS = ["float", "(1,)", "per channel"]
FORMS = [(op, kind) for op in OPS.values() for kind in (KINDS if op.parameters else ["plain"])]
SHAPE = (2, 3, 2)

# @each_form def test(op, kind); with @each_place a third argument, inplace
each_form = pytest.mark.parametrize("op, kind", FORMS, ids=[f"{op.name}-{kind}" for op, kind in FORMS])
each_place = pytest.mark.parametrize("inplace", [False, True], ids=["new", "in place"])


def make_args(
    op, kind, dtype=torch.float64, device="cpu", shape=SHAPE, parameter_dtype=None, requires_grad=False
) -> list:
    """An input and the op's parameters. No element is near 0, where relu has no derivative."""
    x = data(shape, dtype, device)
    x = torch.where(x == 0, 0.3, x)
    parameters = list(make_parameters(op, kind, x))
    if parameter_dtype is not None:
        parameters = [p.to(parameter_dtype) if isinstance(p, torch.Tensor) else p for p in parameters]
    args = [x, *parameters]
    return [a.requires_grad_() if isinstance(a, torch.Tensor) and requires_grad else a for a in args]


def tensors(args) -> list:
    return [a for a in args if isinstance(a, torch.Tensor)]


def call(op, inplace):
    """The op as a function of fresh tensors, whether or not it works in place."""
    if inplace:
        return lambda x, *parameters: op(x.clone(), *parameters, inplace=True)
    return op


links_by_inductor = pytest.mark.skipif(
    " " in torch.__file__ and torch.__version__ < "2.14",
    reason="Inductor of torch before 2.14 does not quote the path of torch when it links, and this one has a space",
)
