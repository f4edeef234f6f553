"""Forward: every operator x dtype x layout x parameter gives what the stock expression gives, strides included."""

import itertools
import math

import numpy as np
import pytest
import torch
from cases import (
    BAREBONES,
    COMPUTE,
    DTYPES,
    FLOATS,
    INPUTS,
    INTS,
    OPS,
    PARAMETERS,
    assert_same,
    data,
    has_layout,
    make_input,
    make_parameters,
    short,
)

SCALE, ADD, RELU = OPS["scale"], OPS["add_scalar"], OPS["relu"]
every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
PARAMETRIZED = [op for op in OPS.values() if op.parameters]
every_parametrized_op = pytest.mark.parametrize("op", PARAMETRIZED, ids=lambda op: op.name)


def all_(op, parameter):
    """The op's parameters, each of them this one."""
    return [parameter] * len(op.parameters)


def check_forward(op, input, *parameters, dim=1):
    """Ours against the contract and the stock expression; nothing that went in has changed, nor is it shared."""
    before = [t.clone() for t in (input, *parameters) if isinstance(t, torch.Tensor)]
    output = op(input, *parameters, dim=dim)
    after = [t for t in (input, *parameters) if isinstance(t, torch.Tensor)]
    for old, new in zip(before, after, strict=True):
        assert_same(new, old)
    stock = op.stock(input, *parameters, dim=dim)
    expected = op.expected(input, *parameters, dim=dim)
    close = op.tolerance(expected.dtype)
    assert_same(output, expected, strides=op.strides(stock, output), signed_zero=not op.name.endswith("relu"), **close)
    if stock.dtype == expected.dtype and expected.dtype not in COMPUTE:  # reduced precision: stock may round more often
        assert_same(output, stock, signed_zero=not op.name.endswith("relu"), **close)
    assert not any(torch._C._is_alias_of(output, tensor) for tensor in after)
    return output


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_op
def test_every_layout_and_parameter(op, dtype, device):
    tried, wrong = 0, []
    for name, kind in itertools.product(INPUTS, PARAMETERS if op.parameters else ["none"]):
        if not has_layout(name, dtype):
            continue
        input = make_input(name, dtype, device)
        parameters = make_parameters(op, kind, input)
        if op.takes(op.result_type(input, *parameters)):
            tried += 1
            try:
                check_forward(op, input, *parameters)
            except Exception as error:
                wrong.append(f"{name} with {kind}: {short(error)}")
    if wrong:
        pytest.fail(f"{len(wrong)} of {tried} are wrong:\n" + "\n".join(wrong))
    assert tried >= len(INPUTS) - 2 or not op.takes(dtype)


@pytest.mark.parametrize("shape", [(4, 5, 6), (1, 1, 1), (2, 1000), (33, 2, 3), (1031,), (0, 3), (3, 0)], ids=str)
@every_parametrized_op
def test_channels_along_any_dimension(op, shape, device):
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        for dim in range(-len(shape), len(shape)):
            for kind in ("per channel", "per channel, strided", "per channel, float32", "per channel, expanded"):
                for permuted in (False, True):
                    input = data(shape[::-1] if permuted else shape, dtype, device)
                    input = input.permute(*range(len(shape) - 1, -1, -1)) if permuted else input
                    check_forward(op, input, *make_parameters(op, kind, input, dim), dim=dim)


@every_parametrized_op
def test_parameter_that_never_widens(op, device):
    """The result type is that of a 0-d factor, whatever the factor's shape."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int32, torch.bool):
        for factor_dtype in (
            torch.float64,
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.complex128,
            torch.int64,
        ):
            input = data((3, 5, 4), dtype, device)
            if not op.takes(torch.result_type(input, torch.ones((), dtype=factor_dtype))):
                continue
            for shape in ((), (1,), (5,)):
                output = op(input, *all_(op, data(shape, factor_dtype, device)))
                assert output.dtype == torch.result_type(input, torch.ones((), dtype=factor_dtype))


@every_parametrized_op
def test_parameter_of_more_precision_is_not_rounded_first(op, device):
    input = data((1031, 5), torch.bfloat16, device)
    for parameter in (
        1 / 3,
        *(torch.full(shape, 1 / 3, dtype=torch.float64, device=device) for shape in ((), (1,), (5,))),
    ):
        for given in (parameter, parameter.float() if isinstance(parameter, torch.Tensor) else parameter):
            output = op(input, *all_(op, given))
            assert_same(output, op.formula(input.float(), *all_(op, 1 / 3)).bfloat16())
            rounded = op.formula(input, *all_(op, torch.tensor(1 / 3).bfloat16().item()))
            assert (output != rounded).sum() > 500  # would be otherwise


SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.1]


def special_values(dtype, device):
    info = torch.finfo(dtype)
    numbers = [*SPECIAL, info.max, info.min, info.tiny, -info.tiny, info.smallest_normal / 4, -info.smallest_normal / 4]
    row = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    return row.repeat(9).to(device)  # in every lane of a vector, and in a tail


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every_op
def test_special_values(op, dtype, device):
    input = special_values(dtype, device)
    numbers = [*SPECIAL, 2.0, 1e300, -1e300, 1e-300, 1e30, -1e-42, 3, True]
    parameters = [(n,) for n in numbers] if op.parameters else [()]
    if op.parameters:
        parameters += [(torch.tensor(n, dtype=torch.float64).to(dtype).to(device),) for n in numbers]
        parameters += [(torch.tensor([n], dtype=torch.float64).to(device),) for n in numbers]
    if op.rounds_once:  # the other parameter is harmless: where stock's first step overflows, ours need not
        parameters = [(1.0, n) for (n,) in parameters] + [(n, -0.0) for (n,) in parameters]
    for given in parameters:
        check_forward(op, input, *given)
        check_forward(op, input[1:], *given)  # misaligned
        check_forward(op, input[::2], *given)
    for per_channel in (input, input.double(), input.float()) if len(op.parameters) == 1 else ():
        check_forward(op, data((3, input.numel()), dtype, device), per_channel)


def test_special_values_of_complex_numbers(device):
    values = special_values(torch.float32, device)
    input = torch.complex(values.repeat_interleave(3), values.repeat(3))
    for number in (complex(a, b) for a in SPECIAL for b in SPECIAL):
        check_forward(SCALE, input, number)
        # Part by part: stock multiplies the second number by alpha = 1 + 0j, which makes inf + 0j an inf + nanj.
        expected = torch.complex(input.real + number.real, input.imag + number.imag)
        assert_same(ADD(input, number), expected)
        assert_same(ADD(input[1:], torch.tensor([number], device=device)), expected[1:])


def test_relu_keeps_nan_and_one_sign_of_zero(device):
    for dtype in FLOATS:
        for size in (1, 7, 1031):
            signs = torch.signbit(RELU(torch.full((size,), -0.0, dtype=dtype, device=device)))
            assert signs.all() or not signs.any()
            assert RELU(torch.full((size,), math.nan, dtype=dtype, device=device)).isnan().all()
            assert RELU(torch.full((2, size), math.nan, dtype=dtype, device=device)[:, :-1]).isnan().all()


NUMPY = [
    np.float64(0.1),
    np.float32(0.1),
    np.float16(0.1),
    np.int64(7),
    np.uint8(7),
    np.bool_(True),
    np.complex64(1 - 2j),
]
NUMPY += [np.array(0.1), np.array(7)]


@pytest.mark.parametrize("number", NUMPY, ids=lambda n: f"{type(n).__name__}-{n.dtype}")
@every_parametrized_op
def test_numpy_numbers(op, number, device):
    """A NumPy number is the Python number that it holds."""
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        input = data((3, 5), dtype, device)
        if op.takes(op.result_type(input, number.item())):
            expected = op.expected(input, *all_(op, number.item()))
            assert_same(op(input, *all_(op, number)), expected, **op.tolerance(expected.dtype))
        else:
            for call in (op, op.stock):
                with pytest.raises(NotImplementedError):
                    call(input, *all_(op, number.item()))


@every_parametrized_op
def test_numbers_keep_their_precision(op, device):
    ones = torch.ones(7, dtype=torch.float64, device=device)
    assert op(ones, *all_(op, 0.1))[0].item() == op.formula(ones[0], *all_(op, 0.1)).item()
    # 2^53 + 1 and 2^62 + 1 are integers that a double does not hold.
    for number in (2**53 + 1, 2**62 + 1, -(2**63), 2**63 - 1):
        check_forward(op, torch.arange(-5, 6, device=device), *all_(op, number))


@pytest.mark.parametrize("dtype", [*INTS, torch.bool], ids=str)
@every_parametrized_op
def test_integers(op, dtype, device):
    """They wrap around, and a floating-point factor gives the default dtype."""
    info = torch.iinfo(dtype) if dtype != torch.bool else None
    extremes = [info.min, info.max, info.max - 1, 0, 1] if info else [True, False]
    input = torch.tensor(extremes * 9, dtype=dtype, device=device)
    for number in (2, -1, 3, 127, 255, 1000, -(2**40), 0.5, True, 1j):
        if not op.takes(op.result_type(input, number)):
            continue
        check_forward(op, input, *all_(op, number))
        check_forward(op, input[1:], *all_(op, number))
    for other in INTS + FLOATS:
        check_forward(op, input, *all_(op, data((1,), other, device)))
        rows = input[:4].expand(3, -1) if info else input[:4].view(1, 4)
        check_forward(op, rows, *all_(op, data((4,), other, device)))
    torch.set_default_dtype(torch.float64)
    try:
        assert check_forward(op, input, *all_(op, 0.5)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@every_parametrized_op
def test_integer_input_is_rounded_once(op, half, device):
    """The result of an integer and a half-precision factor is of half precision, but the input is no such number."""
    input = torch.tensor([[3, 70001, 1023, 4099, 2049]], device=device)
    for factor in (torch.tensor(0.2), torch.tensor([0.2]), torch.tensor([0.2, 0.1, 1.5, 3.0, 0.6])):
        check_forward(op, input, *all_(op, factor.to(half).to(device)))


@pytest.mark.parametrize("dtype", BAREBONES, ids=str)
@every_op
def test_dtypes_for_which_stock_has_few_operators(op, dtype, device):
    """The same values, or an error of the same class."""
    for input in (data((3, 5), dtype, device), data((5, 3), dtype, device).t(), data((0, 5), dtype, device)):
        for number in [2, 0.5, data((5,), dtype, device)] if op.parameters else [None]:
            given = [number] * len(op.parameters)
            try:
                op.stock(input, *given)
            except Exception as error:
                if op.takes(op.result_type(input, *given)) or input.numel() == 0:
                    continue  # stock has not got it yet; whether we have is nobody's loss
                with pytest.raises(type(error)):
                    op(input, *given)
            else:
                check_forward(op, input, *given)


def test_results_of_a_large_tensor_are_right_everywhere(device):
    """More than one thread, and more than one block: each element is at its place."""
    input = torch.arange(1_000_003, dtype=torch.float32, device=device)
    check_forward(SCALE, input, 2.0)
    check_forward(RELU, input - 500_000)
    check_forward(ADD, input[1:].view(-1, 2), torch.tensor([0.5, 2.0], device=device))
    check_forward(ADD, input[3:].view(1000, 1000).t(), data((1000,), torch.float32, device))
