"""PyTorch's own samples: what it tests its mul, add and relu with, from numbers to odd strides, tests ours.

Of the fused operators torch has no twin, and so no samples.
"""

import functools
import warnings
from collections import Counter

import hypothesis
import pytest
import torch
from cases import COMPLEX, COMPUTE, DTYPES, OPS, assert_same, short
from torch import Tensor
from torch.testing import make_tensor

STOCK = {"scale": "mul", "add_scalar": "add", "relu": "nn.functional.relu"}
each_op = pytest.mark.parametrize("op", [OPS[name] for name in STOCK], ids=list(STOCK))


@functools.cache
def info(op):
    """What torch knows of the stock operator. Imported here, for it takes longer than many a test."""
    hypothesis.settings.register_profile("before", hypothesis.settings.default)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as error:  # the [test] extra of pyproject.toml installs what torch imports there
        pytest.skip(f"torch's samples need the module {error.name}, which is not installed")
    finally:
        hypothesis.settings.load_profile("before")  # torch has loaded one of its own
    (found,) = (info for info in op_db if (info.name, info.variant_test_name) == (STOCK[op.name], ""))
    return found


def samples(op, dtype, device):
    for inputs in (info(op).sample_inputs, info(op).reference_inputs):
        yield from inputs(device, dtype, requires_grad=has_gradients(dtype))


def has_gradients(dtype):
    return dtype.is_floating_point or dtype in COMPLEX  # without complex32, which stock cannot sum


def is_ours(sample):
    """Does the contract take it, with the last dimension for that of the channels? Stock broadcasts from there."""
    if not isinstance(sample.input, Tensor) or sample.kwargs:  # add's alpha is no argument of ours
        return False
    return all(
        not isinstance(p, Tensor) or p.numel() == 1 or (p.dim() == 1 and p.shape == sample.input.shape[-1:])
        for p in sample.args
    )


def check_same(op, got, must, strides):
    """Bit for bit. Of complex numbers, finite ones to a few roundings: a compiler may fuse the terms of a product, and
    stock's add multiplies by alpha=1, which makes inf + nanj of inf + 0j. PyTorch's tests leave such values out, too.
    """
    if not got.is_complex():
        return assert_same(got, must, strides=strides, signed_zero=op.name != "relu")
    assert_same(torch.zeros_like(got), torch.zeros_like(must), strides=strides)
    eps, wide = torch.finfo(got.dtype).eps, torch.promote_types(got.dtype, torch.complex64)
    got, must = got.to(wide), must.to(wide)
    finite = must.isfinite()
    torch.testing.assert_close(got[finite], must[finite], rtol=4 * eps, atol=eps * 1e-3)


def check_values(op, sample):
    """Against the contract, and against stock wherever that does not round more often."""
    args = (sample.input, *sample.args)
    output, stock, expected = (f(*args, dim=-1) for f in (op, op.stock, op.expected))
    check_same(op, output, expected, stock.stride())
    if output.dtype not in COMPUTE:
        check_same(op, output, stock, stock.stride())
    with torch.no_grad():
        changed = sample.input.clone()
        strides = changed.stride()
        assert op(changed, *sample.args, dim=-1, inplace=True) is changed
    check_same(op, changed, expected, strides)


def check_gradients(op, sample):
    # Leaves: some samples are views of one that autograd cannot see through.
    args = [a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in (sample.input, *sample.args)]
    wanted = [a for a in args if isinstance(a, Tensor)]
    grad = make_tensor(op.stock(*args, dim=-1).shape, dtype=sample.input.dtype, device=sample.input.device)
    ours, stock, expected = (torch.autograd.grad(f(*args, dim=-1), wanted, grad) for f in (op, op.stock, op.expected))
    assert len(ours) == len(wanted)
    for got, must, like in zip(ours, expected, stock, strict=True):
        assert (got.dtype, got.stride()) == (like.dtype, like.stride()), "dtype and strides must be stock's"
        finite = must.isfinite() if must.is_complex() else torch.ones_like(must, dtype=torch.bool)
        # a parameter's is a sum, in an order of our own
        torch.testing.assert_close(got[finite], must[finite], equal_nan=True)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex32], ids=str)
@each_op
def test_samples(op, dtype, device):
    if dtype not in info(op).supported_dtypes(device):
        pytest.skip("stock does not take the dtype")
    seen, wrong = Counter(), []
    for sample in samples(op, dtype, device):
        try:
            if not is_ours(sample):
                seen["refused"] += 1
                with pytest.raises((TypeError, IndexError, RuntimeError), match=op.name):
                    op.function(sample.input, *sample.args, dim=-1, **sample.kwargs)
                continue
            seen["values"] += 1
            check_values(op, sample)
            if has_gradients(dtype):
                check_gradients(op, sample)
        except (Exception, pytest.fail.Exception) as error:
            wrong.append(f"{sample.summary()}: {short(error)}")
    if wrong:
        pytest.fail(f"{len(wrong)} of {seen} are wrong:\n" + "\n".join(wrong))
    assert seen["values"] >= 25
    assert seen["refused"] >= (50 if op.parameters else 0)


@each_op
def test_error_inputs(op, device):
    if not (errors := list(info(op).error_inputs(device)) if info(op).error_inputs_func else []):
        pytest.skip("torch ships none")
    for error in errors:
        with pytest.raises(error.error_type):
            op.function(error.sample_input.input, *error.sample_input.args, **error.sample_input.kwargs)
