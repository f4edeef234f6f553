"""Bad input: an error of the class that stock raises for the same mistake, with words that help, and no change."""

import re

import numpy as np
import pytest
import torch
from cases import OPS, assert_same, data

SCALE, ADD, RELU = OPS["scale"], OPS["add_scalar"], OPS["relu"]
PARAMETERS = [(op, name) for op in OPS.values() for name in op.parameters]
each_parameter = pytest.mark.parametrize("op, name", PARAMETERS, ids=[f"{op.name}-{name}" for op, name in PARAMETERS])


def with_(op, name, parameter):
    """The op's parameters, among which this one is what is given."""
    return [parameter if name == other else 2 for other in op.parameters]


def check(error, message, ours, stock=None, unchanged=()):
    """Ours raises `error` with words that match, as stock does, and leaves the tensors alone."""
    before = [t.clone() for t in unchanged]
    if stock is not None:
        with pytest.raises(Exception) as raised:
            stock()
        assert raised.type is error, f"stock raises {raised.type.__name__}: {raised.value}"
    with pytest.raises(Exception) as raised:
        ours()
    assert raised.type is error, f"{raised.type.__name__}: {raised.value}"
    assert re.search(message, str(raised.value)), f"{message!r} is not in {str(raised.value)!r}"
    for old, new in zip(before, unchanged, strict=True):
        assert torch.equal(old, new)


def check_both(op, error, message, input, parameters, stock, **kwargs):
    """Out of place, in place, and where gradients are recorded."""
    check(error, message, lambda: op(input, *parameters, **kwargs), stock, (input,))
    check(error, message, lambda: op(input, *parameters, inplace=True, **kwargs), stock, (input,))
    if input.is_floating_point():
        recorded = input.clone().requires_grad_()
        check(error, message, lambda: op(recorded, *parameters, **kwargs), stock)
        check(error, message, lambda: op(recorded * 1, *parameters, inplace=True, **kwargs), stock)
        if any(isinstance(p, torch.Tensor) and p.is_floating_point() for p in parameters):
            learns = [p.clone().requires_grad_() if isinstance(p, torch.Tensor) else p for p in parameters]
            check(error, message, lambda: op(input, *learns, **kwargs), stock)


SHAPE = (2, 64, 3)


@pytest.mark.parametrize(
    ("error", "shape", "dim", "message"),
    [
        (RuntimeError, (32,), 1, r"{op}: {name} must have 1 or 64 elements \(input\.size\(1\)\), got 32"),
        (RuntimeError, (65,), 1, r"1 or 64 elements \(input\.size\(1\)\), got 65"),
        (RuntimeError, (64,), 0, r"1 or 2 elements \(input\.size\(0\)\), got 64"),
        (RuntimeError, (64,), -1, r"1 or 3 elements \(input\.size\(-1\)\), got 64"),
        (RuntimeError, (0,), 1, r"1 or 64 elements \(input\.size\(1\)\), got 0"),
        (IndexError, (64,), 3, r"dim must be in the range \[-3, 2\] .*\[2, 64, 3\].* got 3"),
        (IndexError, (64,), -4, r"dim must be in the range \[-3, 2\] .*got -4"),
        (RuntimeError, (64, 1), 1, r"must be a number, .*one element.*one dimension, got shape \[64, 1\]"),
        (RuntimeError, (2, 64, 3), 1, r"one dimension, got shape \[2, 64, 3\]"),
        (RuntimeError, (1, 64, 1), 1, r"one dimension, got shape \[1, 64, 1\]"),
    ],
    ids=str,
)
@each_parameter
def test_shape_of_the_parameter(op, name, error, shape, dim, message, device):
    """What stock says of a shape that does not broadcast, or of a dimension that is not there."""
    message = message.format(op=op.name, name=name)
    input, parameters = data(SHAPE, torch.float32, device), with_(op, name, data(shape, torch.float32, device))

    def stock():
        if error is IndexError:
            return input.size(dim)
        # A shape that stock would broadcast is refused too: it is more likely a slip than one number per channel.
        return op.formula(input, *with_(op, name, torch.ones(7, device=device)))

    check_both(op, error, message, input, parameters, stock, dim=dim)


@each_parameter
def test_dim_of_an_input_without_one(op, name, device):
    parameters = with_(op, name, data((3,), torch.float32, device))
    for shape in ((), (3,)):
        input, message = data(shape, torch.float32, device), r"dim must be in the range \[-1, 0\] .*got 1"
        check_both(op, IndexError, message, input, parameters, lambda: input.sum(1))  # noqa: B023
        check(IndexError, message, lambda: op.reference(input, *parameters))  # noqa: B023
    scalar = data((), torch.float32, device)
    for dim in (0, -1):  # in that range, of which a 0-d tensor has nothing
        message = f"Dimension specified as {dim} but tensor has no dimensions"
        check_both(op, IndexError, message, scalar, parameters, lambda: scalar.size(dim), dim=dim)  # noqa: B023
        check(IndexError, message, lambda: op.reference(scalar, *parameters, dim=dim))  # noqa: B023
    parameters = with_(op, name, data((1,), torch.float32, device))
    assert op(data((3,), torch.float32, device), *parameters, dim=7).shape == (3,)  # not looked at: it says nothing


@pytest.mark.parametrize("dim", ["1", 1.0, None, [1]], ids=repr)
@each_parameter
def test_dim_that_is_no_int(op, name, dim, device):
    input, message = data((4, 3), torch.float32, device), f"{op.name}: dim must be an int, got {type(dim).__name__}"
    for parameter in (2.0, data((3,), torch.float32, device)):
        check_both(op, TypeError, message, input, with_(op, name, parameter), None, dim=dim)


@each_parameter
def test_dim_that_is_an_int_of_numpy(op, name, device):
    input, parameters = data((4, 3), torch.float32, device), with_(op, name, data((3,), torch.float32, device))
    assert_same(op(input, *parameters, dim=np.int64(1)), op(input, *parameters))
    assert_same(op(input.clone(), *parameters, dim=np.int64(1), inplace=True), op(input, *parameters))


@pytest.mark.parametrize("wrong", ["2", None, [2.0], (2.0,), {}, slice(1), torch.float32], ids=repr)
@each_parameter
def test_parameter_that_is_no_number(op, name, wrong, device):
    message = rf"{op.name}: {name} must be a number or a Tensor, got {type(wrong).__name__}"
    input = data((4, 3), torch.float32, device)
    parameters = with_(op, name, wrong)
    check_both(op, TypeError, message, input, parameters, lambda: op.formula(input, *parameters))


def test_input_that_is_no_tensor():
    for op in OPS.values():
        for wrong in (2.0, None, [1.0], "x"):
            message = f"{op.name}: input must be a Tensor, got {type(wrong).__name__}"
            check(TypeError, message, lambda: op(wrong, *([2.0] * len(op.parameters))))  # noqa: B023
    check(TypeError, "", lambda: torch.relu([1.0]))  # as stock


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@each_parameter
def test_integer_beyond_64_bits(op, name, dtype, number, device):
    input = data((4, 3), dtype, device)
    parameters, message = with_(op, name, number), f"{op.name}: {name} must fit into 64 bits, got {number}"
    check_both(op, OverflowError, message, input, parameters, lambda: op.formula(input, *parameters))


@each_parameter
def test_parameter_on_another_device(op, name, device):
    """meta is a second device that every machine has."""
    input = data((4, 3), torch.float32, device)
    message = rf"{op.name}: {name} must be on the device of input, {device}.*, got meta"
    for shape in ((), (1,), (3,)):
        parameter = torch.ones(shape, device="meta")
        for inplace in (False, True):
            with pytest.raises(RuntimeError, match=message):
                op(input, *with_(op, name, parameter), inplace=inplace)
        with pytest.raises(RuntimeError, match=message):
            op(input.clone().requires_grad_(), *with_(op, name, parameter))
        with pytest.raises(RuntimeError, match=message):
            op(input, *with_(op, name, parameter.requires_grad_()))
    meta = torch.empty((4, 3), device="meta")
    with pytest.raises(RuntimeError, match="device of input, meta, got"):
        op(meta, *with_(op, name, torch.ones(3, device=device)))


@pytest.mark.parametrize("shape", [(1,), (3,)], ids=str)
@pytest.mark.parametrize("of_input", ["cpu", "cuda"])
@each_parameter
def test_parameter_on_cpu_or_cuda(op, name, of_input, shape, cuda):
    other = "cpu" if of_input == cuda else cuda
    input, parameters = data((4, 3), torch.float32, of_input), with_(op, name, data(shape, torch.float32, other))
    stock = with_(op, name, data((3,), torch.float32, other))
    message = rf"device of input, {of_input}.*, got {other}"
    check_both(op, RuntimeError, message, input, parameters, lambda: op.formula(input, *stock))


@each_parameter
def test_number_on_cuda_and_input_on_the_cpu(op, name, cuda):
    input, numbers = data((4, 3), torch.float32), with_(op, name, data((), torch.float32, cuda))
    check_both(op, RuntimeError, "device of input, cpu, got cuda", input, numbers, lambda: op.formula(input, *numbers))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32, torch.bool], ids=str)
def test_relu_of_what_has_no_order(dtype, device):
    for input in (data((4, 3), dtype, device), data((3, 4), dtype, device).t()):
        before = input.clone()
        with pytest.raises(Exception) as stock:
            torch.relu(input)
        for inplace in (False, True):
            with pytest.raises(stock.type, match=r"relu.*: the dtype must be .*, got (Complex|Bool)"):
                RELU(input, inplace=inplace)
        assert_same(input, before)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_dtypes_that_stock_refuses(name, device):
    input = data((4, 3), torch.float32, device).to(getattr(torch, name))
    bits = input.view(torch.uint8).clone()
    for op in OPS.values():
        parameters = [2.0] * len(op.parameters)
        with pytest.raises(Exception) as stock:
            op.stock(input, *parameters)
        for inplace in (False, True):
            with pytest.raises(stock.type, match=op.name):
                op(input, *parameters, inplace=inplace)
    assert torch.equal(input.view(torch.uint8), bits)


def test_sparse_tensors():
    """There are no kernels for them; what stock makes of them is right, or an error."""
    input = torch.ones(4, 3).to_sparse()
    assert torch.equal(SCALE(input, 2.0).to_dense(), torch.full((4, 3), 2.0))
    assert torch.equal(RELU(-input).to_dense(), torch.zeros(4, 3))
    for op in (ADD, OPS["scale_add"], OPS["scale_add_relu"]):
        numbers = [2.0] * len(op.parameters)
        check(RuntimeError, "sparse", lambda: op(input, *numbers), lambda: op.formula(input, *numbers))  # noqa: B023


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_nested_tensors(op):
    """Of the jagged layout, which is of Python, they run the reference. Of the strided one there is nothing to run."""
    parts, numbers = [data((2, 3), torch.float32), data((4, 3), torch.float32)], [2.0] * len(op.parameters)
    output = op(torch.nested.nested_tensor(parts, layout=torch.jagged), *numbers)
    for part, result in zip(parts, output.unbind(), strict=True):
        torch.testing.assert_close(result, op.expected(part, *numbers))
    for inplace in (False, True):
        with pytest.raises(NotImplementedError, match=f"my_cuda_op::{op.name}.* 'NestedTensorCPU' backend"):
            op(torch.nested.nested_tensor(parts), *numbers, inplace=inplace)


def test_unknown_keyword_and_missing_argument():
    x = torch.ones(4, 3)
    for call in (lambda: SCALE.function(x), lambda: SCALE.function(x, 2.0, 1), lambda: RELU.function(x, dim=1)):
        check(TypeError, "argument", call)


def test_more_dimensions_than_a_kernel_takes(cuda):
    """25, as stock: strides of 1 everywhere keep the input small and let nothing merge."""
    for ndim in (25, 26):
        input = torch.arange(ndim + 1, dtype=torch.int8, device=cuda).as_strided((2,) * ndim, (1,) * ndim)
        if ndim == 25:
            assert torch.equal(ADD(input, 1), input + 1)
        else:
            with pytest.raises(RuntimeError, match="25"):
                torch.add(input, 1)
            with pytest.raises(RuntimeError, match="at most 25 dimensions"):
                ADD(input, 1)
