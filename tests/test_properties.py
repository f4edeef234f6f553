"""Anything goes: shapes, strides, offsets, values, parameters and gradients that nobody thought of, against stock."""

import hypothesis
import torch
from cases import COMPUTE, OPS, assert_same, data
from hypothesis import strategies as st
from test_backward import check_sum, differentiable, gradients, terms

hypothesis_runs = hypothesis.settings(max_examples=150)
SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, 1e-42, -1e-42, 65504.0, 3e38, 1e300, 127.0]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.int8,
    torch.int64,
    torch.uint8,
]


@st.composite
def arrangements(draw, shape):
    """How a tensor of this shape lies in memory: (order of dimensions, which are expanded, steps, padding, offset)."""
    n = len(shape)
    order = draw(st.permutations(range(n)))
    expanded = draw(st.lists(st.booleans(), min_size=n, max_size=n)) if draw(st.integers(0, 3)) == 0 else [False] * n
    steps = draw(st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=n, max_size=n))
    padding = draw(st.lists(st.sampled_from([0, 0, 0, 1, 4]), min_size=n, max_size=n))
    return order, expanded, steps, padding, draw(st.integers(0, 5))


def arrange(shape, arrangement, dtype, device):
    order, expanded, steps, padding, offset = arrangement
    strides, stride = [0] * len(shape), 1
    for d in reversed(order):
        if expanded[d]:
            continue
        strides[d] = stride * steps[d]
        stride *= max(shape[d], 1) * steps[d] + padding[d]
    return data((stride + offset,), dtype, device).as_strided(shape, strides, offset)


MISALIGNED = (range(4), [False] * 4, [1] * 4, [0] * 4, 1)


@st.composite
def calls(draw):
    """An operator and all that it is called with, except for the device."""
    shape = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 17, 33]), min_size=0, max_size=5).map(tuple))
    hypothesis.assume(torch.Size(shape).numel() <= 4096)
    op = draw(st.sampled_from(list(OPS.values())))
    dtype = draw(st.sampled_from([d for d in DTYPES if op.takes(d)]))
    dim = draw(st.integers(-len(shape), len(shape) - 1)) if shape else 0
    numbers = st.one_of(
        st.floats(), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.sampled_from(SPECIAL), st.just(1.5 - 2j)
    )
    tensors = st.tuples(
        st.sampled_from(["()", "(1,)", "(C,)"]), st.sampled_from([dtype, torch.float32, torch.float64, torch.int64]),
        st.integers(1, 2), st.integers(0, 2),
    )  # fmt: skip
    parameters = [draw(numbers | tensors) for _ in op.parameters]
    layouts = [draw(arrangements(shape)), draw(arrangements(shape))]
    special = draw(st.lists(st.tuples(st.integers(0, 4095), st.sampled_from(SPECIAL)), max_size=4))
    return op, shape, dtype, dim, parameters, layouts, special


def build(call, device):
    op, shape, dtype, dim, parameters, (of_input, of_grad), special = call
    input = arrange(shape, of_input, dtype, device)
    storage = input.as_strided((max(input.untyped_storage().size() // input.element_size(), 1),), (1,), 0)
    for index, value in special if dtype.is_floating_point else ():
        storage[index % storage.numel()] = torch.tensor(value, dtype=torch.float64).to(dtype)  # 1e300 as inf

    def parameter(kind):
        if not isinstance(kind, tuple):
            return kind
        size, dtype, step, offset = kind
        if size == "()":
            return data((), dtype, device)
        length = 1 if size == "(1,)" or not shape else shape[dim]
        return data((length * step + offset,), dtype, device)[offset::step]

    parameters = [parameter(kind) for kind in parameters]
    result = op.result_type(input, *parameters)
    hypothesis.assume(op.takes(result))
    return op, input, parameters, dim, arrange(shape, of_grad, result, device)


def close(op, *dtypes):
    """Products of complex numbers may be fused, which changes the last bits: of the coarsest of these dtypes."""
    if any(op.tolerance(dtype) for dtype in dtypes):
        return {"rtol": max(1e-5, *[4 * torch.finfo(dtype).eps for dtype in dtypes]), "atol": 1e-4}
    return {"signed_zero": not op.name.endswith("relu")}


def overflows(op, input, *parameters):
    """Not compared: products of complex numbers that overflow, where inf - inf depends on the order of evaluation, and
    sums of large numbers that cancel, where the rounding of every step shows."""
    numbers = [n for n in parameters if not isinstance(n, torch.Tensor)]
    unusual = any(n != n or abs(n) > 1e18 for n in numbers) or not torch.isfinite(input).all()
    large = op.rounds_once and (any(abs(n) > 100 for n in numbers) or (input.numel() and input.abs().max() > 100))
    return (op.result_type(input, *parameters).is_complex and unusual) or (unusual and op.rounds_once) or large


@hypothesis_runs
@hypothesis.given(call=calls(), inplace=st.booleans())
def test_forward_is_that_of_stock(call, inplace, device):
    op, input, parameters, dim, _ = build(call, device)
    hypothesis.assume(not overflows(op, input, *parameters))
    expected, stock = op.expected(input, *parameters, dim=dim), op.stock(input, *parameters, dim=dim)
    overlaps = any(s == 0 and n > 1 for n, s in zip(input.shape, input.stride(), strict=True))
    if inplace and (overlaps or not torch.can_cast(expected.dtype, input.dtype)):
        inplace = False
    before = input.clone()
    output = op(input, *parameters, dim=dim, inplace=inplace)
    if inplace:
        assert output is input
        assert_same(input, expected.to(input.dtype), **close(op, input.dtype))
    else:
        assert_same(output, expected, strides=op.strides(stock, output), **close(op, expected.dtype))
        assert_same(input, before)


@hypothesis_runs
@hypothesis.given(call=calls())
@hypothesis.example(  # computed in complex64, rounded to bfloat16
    call=(OPS["scale_add"], (1, 17, 8, 8), torch.bfloat16, 1, [1.5 - 2j] * 2, [MISALIGNED] * 2, [])
)
@hypothesis.example(  # whose gradient is the real part of a complex one
    call=(OPS["scale_add"], (2, 3, 1, 4), torch.float32, 1, [0.5, 1.5 - 2j], [MISALIGNED] * 2, [])
)
def test_gradients_are_those_of_stock(call, device):
    op, input, parameters, dim, grad = build(call, device)
    hypothesis.assume(any(map(differentiable, (input, *parameters))))
    hypothesis.assume(torch.isfinite(input).all() or not op.parameters)
    hypothesis.assume(grad.dtype != torch.complex32)
    hypothesis.assume(not overflows(op, input, *parameters))
    got = list(gradients(op, (input, *parameters), grad, dim=dim))
    if differentiable(input):
        detached = [p.detach() if differentiable(p) else p for p in parameters]
        (expected,) = gradients(lambda x: op.expected(x, *detached, dim=dim), [input], grad)
        stock = op.stock(input, *parameters, dim=dim)
        strides = None
        if stock.dtype == grad.dtype:
            strides = op.strides(gradients(op.stock, (input, *parameters), grad, dim=dim)[0], got[0])
        tolerance = close(op, grad.dtype, input.dtype) if grad.is_complex() else {"signed_zero": False}
        assert_same(got.pop(0), expected, strides=strides, **tolerance)
    small = (
        grad.abs().amax() < 1e4 and input.abs().max() < 1e4 if grad.numel() and input.dtype not in COMPUTE else False
    )
    for name, parameter in zip(op.parameters, parameters, strict=True):
        if not differentiable(parameter):
            continue
        gradient = got.pop(0)
        if small:
            check_sum(terms(op, name, input, parameters, grad, dim), gradient, parameter, grad, dim)
        assert (gradient.shape, gradient.dtype) == (parameter.shape, parameter.dtype)
