"""Backward: incoming gradients of every layout, for the input and for every kind of parameter."""

import itertools

import pytest
import torch
from cases import (
    COMPLEX,
    COMPUTE,
    FLOATS,
    INPUTS,
    LAYOUTS,
    OPS,
    PARAMETERS,
    SHAPE,
    assert_same,
    data,
    has_layout,
    make_input,
    make_parameters,
    short,
)

from my_cuda_op import reference

every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
every_parametrized_op = pytest.mark.parametrize(
    "op", [op for op in OPS.values() if op.parameters], ids=lambda op: op.name
)


def differentiable(tensor):
    return isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())


def leaves(tensors):
    """The same memory and layout as leaves that require grad."""
    return [t.detach().requires_grad_() if differentiable(t) else t for t in tensors]


def gradients(function, inputs, grad, **kwargs):
    inputs = leaves(inputs)
    output = function(*inputs, **kwargs)
    wanted = [t for t in inputs if differentiable(t)]
    return torch.autograd.grad(output, wanted, grad.to(output.dtype))


def check_backward(op, input, *parameters, grad, dim=1):
    """Ours against float64 (sums), against the contract (the input's, exactly) and against stock's strides."""
    given = (input, *parameters)
    copy = grad.clone()
    got = list(gradients(op, given, grad, dim=dim))
    assert_same(grad, copy)
    if differentiable(input):
        got_input = got.pop(0)
        parameters_only = [p.detach() if differentiable(p) else p for p in parameters]
        expected = gradients(lambda x: op.expected(x, *parameters_only, dim=dim), [input], grad)[0]
        comparable = (
            op.stock(*given, dim=dim).dtype == grad.dtype and grad.dtype != torch.complex32
        )  # stock cannot sum it
        strides = op.strides(gradients(op.stock, given, grad, dim=dim)[0], got_input) if comparable else None
        eps = 64 * torch.finfo(expected.dtype).eps if grad.is_complex() and op.parameters else 0.0  # fused multiply-add
        assert_same(got_input, expected, strides=strides, rtol=eps, atol=eps, signed_zero=False)
    for name, parameter in zip(op.parameters, parameters, strict=True):
        if differentiable(parameter):
            check_sum(terms(op, name, input, parameters, grad, dim), got.pop(0), parameter, grad, dim)
    assert not got


def terms(op, name, input, parameters, grad, dim):
    """What the gradient of this parameter is the sum of."""
    wide = torch.complex128 if grad.is_complex() else torch.float64
    grad = grad.to(wide)
    if op.name.endswith("relu"):
        grad = torch.where(op.expected(input, *parameters, dim=dim) <= 0, 0, grad)
    return grad * input.to(wide).conj() if name == "factor" else grad


def check_sum(terms, got, parameter, grad, dim):
    assert (got.dtype, got.shape, got.device) == (parameter.dtype, parameter.shape, parameter.device)
    others = [d for d in range(grad.dim()) if parameter.numel() == 1 or d != dim % grad.dim()]
    exact, size = (t.sum(others) if others else t for t in (terms, terms.abs()))
    if not parameter.is_complex() and exact.is_complex():
        exact = exact.real
    count = max(terms.numel() // parameter.numel(), 1) if parameter.numel() else 1
    # A row of partial sums covers 4096 elements of a channel, or a 1024th of them, in 16 sums side by side; then come
    # the rows. So no element goes through more additions than this, and each rounds once.
    additions = max(4096, count / 1024) / 16 + 64
    accumulator = COMPUTE.get(grad.dtype, grad.dtype)
    error = additions * torch.finfo(accumulator).eps * size + torch.finfo(parameter.dtype).eps * exact.abs()
    too_far = (
        (got.to(exact.dtype).cpu() - exact.reshape(got.shape).cpu()).abs() > error.reshape(got.shape).cpu()
    ).nonzero()
    assert not len(too_far), f"{len(too_far)} sums of {count} are wrong: got {got}, exact {exact}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_op
def test_every_pair_of_layouts(op, dtype, device):
    """Of the input and of the incoming gradient."""
    wrong = []
    layouts = [name for name in LAYOUTS if has_layout(name, dtype)]
    for of_input, of_grad in itertools.product(layouts, layouts):
        input, grad = make_input(of_input, dtype, device), make_input(of_grad, dtype, device)
        try:
            check_backward(op, input, *make_parameters(op, "per channel", input), grad=grad)
        except Exception as error:
            wrong.append(f"{of_input}, gradient {of_grad}: {short(error)}")
    if wrong:
        pytest.fail(f"{len(wrong)} are wrong:\n" + "\n".join(wrong))


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
@every_op
def test_every_input_and_parameter(op, dtype, device):
    wrong = []
    for name, kind in itertools.product(INPUTS, PARAMETERS if op.parameters else ["none"]):
        if not has_layout(name, dtype) or not op.takes(dtype):
            continue
        input = make_input(name, dtype, device)
        parameters = make_parameters(op, kind, input)
        grad_dtype = op.result_type(input, *parameters)
        if not op.takes(grad_dtype):
            continue
        grad = LAYOUTS["transposed"](input.shape, grad_dtype, device)
        try:
            check_backward(op, input, *parameters, grad=grad)
        except Exception as error:
            wrong.append(f"{name} with {kind}: {short(error)}")
    if wrong:
        pytest.fail(f"{len(wrong)} are wrong:\n" + "\n".join(wrong))


@every_parametrized_op
def test_integer_input_with_a_learnable_parameter(op, device):
    for dtype in (torch.int64, torch.uint8, torch.bool):
        for of_grad in ("contiguous", "transposed", "expanded"):
            input = make_input("channels_last", dtype, device)
            for parameter in (
                data((5,), torch.float32, device),
                data((), torch.float64, device),
                data((1,), torch.float32, device),
            ):
                grad = make_input(of_grad, op.result_type(input, parameter), device)
                check_backward(op, input, *[parameter] * len(op.parameters), grad=grad)


@every_op
def test_gradient_of_sum_and_mean(op, device):
    """Of the loss of a hurry: it arrives expanded, with stride 0 everywhere."""
    input = data(SHAPE, torch.float64, device).requires_grad_()
    parameters = leaves(make_parameters(op, "per channel", input))
    for reduce in (torch.sum, torch.mean, torch.max, lambda y: y[:, 1:].sum(), lambda y: y.transpose(0, 2)[1].sum()):
        inputs = [input, *parameters]
        ours = torch.autograd.grad(reduce(op(*inputs)), inputs)
        stock = torch.autograd.grad(reduce(op.stock(*inputs)), inputs)
        for got, expected in zip(ours, stock, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "shape", [(2, 1, 3), (7,), (1, 1000), (1000, 3), (0, 3), (3, 0), (9, 33, 7), (4, 3, 5, 6)], ids=str
)
@every_parametrized_op
def test_channels_along_any_dimension(op, shape, device):
    for dtype, dim in itertools.product((torch.float32, torch.float64, torch.float16), range(-len(shape), len(shape))):
        for kind in ("per channel", "per channel, strided", "per channel, float32"):
            for reverse in (False, True):
                input, grad = data(shape, dtype, device), LAYOUTS["transposed"](shape, dtype, device)
                input, grad = (grad, input) if reverse else (input, grad)
                check_backward(op, input, *make_parameters(op, kind, input, dim), grad=grad, dim=dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2**22,), (2**15, 1, 128), (2**14, 257), (4096, 1000), (3, 7, 2**17 + 5)], ids=str)
@every_parametrized_op
def test_large_sums_are_exact_to_rounding(op, shape, dtype, device):
    """The terms are alike and of one sign, so that errors add up: a running sum would be off by per cents."""
    scale = 1e-3 if dtype == torch.float16 else 1.0  # 2^22 * 0.1 is more than float16 has room for
    grad = (torch.rand(shape, device=device) * 0.01 + 0.1).to(dtype) * scale
    input = (torch.rand(shape, device=device) * 0.01 + 0.1).to(dtype)
    for parameter_shape in ((), (shape[1],)) if len(shape) > 1 else ((), (1,)):
        for parameter_dtype in {torch.float32, dtype}:
            parameter = torch.ones(parameter_shape, dtype=parameter_dtype, device=device, requires_grad=True)
            parameters = [parameter.detach().clone().requires_grad_() for _ in op.parameters]
            gradients = torch.autograd.grad(op(input, *parameters), parameters, grad)
            for name, got in zip(op.parameters, gradients, strict=True):
                check_sum(terms(op, name, input, parameters, grad, 1), got, parameter, grad, dim=1)


@every_parametrized_op
def test_sums_are_the_same_from_run_to_run(op, device):
    """Bit for bit, and with any number of threads."""
    for shape, parameter_shape in (((2**21,), ()), ((64, 33, 1000), (33,)), ((2**14, 65), (65,))):
        input, grad = data(shape, torch.float32, device), data(shape, torch.float32, device)
        results, threads = [], torch.get_num_threads()
        try:
            for count in (1, 2, 3, 2):
                torch.set_num_threads(count)
                parameter = torch.ones(parameter_shape, device=device, requires_grad=True)
                results.append(torch.autograd.grad(op(input, *[parameter] * len(op.parameters)), parameter, grad)[0])
        finally:
            torch.set_num_threads(threads)
        for result in results[1:]:
            assert_same(result, results[0])


def test_relu_gradient_at_special_values(device):
    """Zero at 0 and -0, and through NaN; a NaN or infinite gradient where the input is negative leaves nothing."""
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 1e-42, -1e-42]
    for dtype in FLOATS:
        input = torch.tensor(special, dtype=torch.float64).to(dtype).to(device).repeat_interleave(len(special))
        grad = torch.tensor(special, dtype=torch.float64).to(dtype).to(device).repeat(len(special))
        for start in (0, 1):
            (got,) = gradients(OPS["relu"], [input[start:]], grad[start:])
            (stock,) = gradients(torch.relu, [input[start:]], grad[start:])
            assert_same(got, stock, signed_zero=False)


@every_parametrized_op
def test_only_what_needs_a_gradient_gets_one(op, device):
    for needs in itertools.product((True, False), repeat=1 + len(op.parameters)):
        if not any(needs):
            continue
        input = data((4, 3), torch.float32, device).requires_grad_(needs[0])
        parameters = [data((3,), torch.float32, device).requires_grad_(need) for need in needs[1:]]
        op(input, *parameters).sum().backward()
        assert tuple(t.grad is not None for t in (input, *parameters)) == needs
    numbers = [2.0] * len(op.parameters)
    with torch.no_grad():
        assert not op(data((4, 3), torch.float32, device).requires_grad_(), *numbers).requires_grad
    assert not op(data((4, 3), torch.float32, device), *numbers).requires_grad


# Fewer bits than a byte, than a word; rows that begin at any bit; so many that several threads share them, and the
# last byte is not full.
MASKED = [((5,), "contiguous"), ((2, 9), "inner_slice"), ((64, 5, 7, 7), "contiguous")]
MASKED += [
    ((3, 7, 1601), name) for name in ("contiguous", "transposed", "channels_last", "inner_slice", "every_second")
]


@pytest.mark.parametrize(("shape", "layout"), MASKED, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mask(device, dtype, shape, layout):
    """Its bits, and a gradient that goes through it in the order of another layout."""
    input = LAYOUTS[layout](shape, dtype, device)
    output, mask = torch.ops.my_cuda_op.scale_add_relu_masked(input, 2, 0.5, dim=0)
    assert_same(mask, reference.pack(output))
    for grad_layout in ("contiguous", "transposed", "inner_slice", "every_second", "expanded"):
        grad = LAYOUTS[grad_layout](shape, dtype, device)
        needs = [True, False, False, True]
        by_input, by_residual = torch.ops.my_cuda_op.scale_add_backward(
            grad, None, mask, output.stride(), 2, None, needs
        )
        assert_same(by_residual, torch.where(output <= 0, 0, grad), signed_zero=False)
        assert_same(by_input, torch.where(output <= 0, 0, 2 * grad), signed_zero=False)


@pytest.mark.parametrize("shape, dim", [((1_000_000, 2), 1), ((8, 2048, 768), 0), ((4, 3, 300, 300), 1)], ids=str)
def test_long_sums_keep_their_digits(shape, dim, device):
    # The same number over and over rounds the same way over and over, where a float adds up too many.
    grad = torch.full(shape, 0.1, device=device)
    value = torch.ones(shape[dim], device=device)
    total = torch.ops.my_cuda_op.add_scalar_backward_value(grad, value, dim)
    expected = grad.double().sum([d for d in range(grad.dim()) if d != dim])
    torch.testing.assert_close(total.double(), expected, rtol=2e-5, atol=0)


@pytest.mark.parametrize("dim", [0, 1])
def test_sums_of_work_that_is_split_start_at_zero(dim, device):
    """Offsets that do not fit into 32 bits: several parts add to the same sums, or each to those of its channels."""
    step = 2**29 + 16  # of float32, and so three rows reach over 4 GiB, of which a CPU touches three pages
    grad = torch.empty(2 * step + 5, device=device).as_strided((3, 5), (step, 1))
    grad.copy_(data((3, 5), torch.float32, device))
    input = data((3, 5), torch.float32, device)
    ones = torch.ones(grad.size(dim), device=device)
    torch.use_deterministic_algorithms(True)  # fills what an operator allocates with NaN
    try:
        by_value = torch.ops.my_cuda_op.add_scalar_backward_value(grad, ones, dim)
        by_factor = torch.ops.my_cuda_op.scale_backward_factor(grad, input, ones, dim)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(by_value, grad.sum(1 - dim))
    torch.testing.assert_close(by_factor, (grad * input).sum(1 - dim))
