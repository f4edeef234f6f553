"""In place: the object itself, nothing but the object, and gradients right through it; or an error and no change."""

import itertools

import pytest
import torch
from cases import (
    COMPUTE,
    DTYPES,
    INPUTS,
    OPS,
    PARAMETERS,
    assert_same,
    data,
    has_layout,
    make_input,
    make_parameters,
    short,
)

every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
every_parametrized_op = pytest.mark.parametrize(
    "op", [op for op in OPS.values() if op.parameters], ids=lambda op: op.name
)


def arguments(op, *parameters):
    """As many parameters as the op has: these, and then the last one again."""
    return (*parameters, *[parameters[-1]] * len(op.parameters))[: len(op.parameters)]


def overlaps_itself(tensor):
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def memory(tensor):
    return (
        torch.empty(0, dtype=torch.uint8)
        .set_(tensor.detach().resolve_neg().resolve_conj().cpu().untyped_storage())
        .clone()
    )


def check_refused(op, input, *parameters, match=None, **kwargs):
    """As stock refuses it: an error of the same class, before anything has changed."""
    before, version = memory(input), None if input.is_inference() else input._version
    with pytest.raises(Exception) as stock:
        op.stock(input, *parameters, inplace=True, **kwargs)
    assert torch.equal(memory(input), before)
    with pytest.raises(stock.type, match=match):
        op(input, *parameters, inplace=True, **kwargs)
    assert torch.equal(memory(input), before)
    assert version is None or input._version == version


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_op
def test_every_layout_and_parameter(op, dtype, device):
    wrong = []
    for name, kind in itertools.product(INPUTS, PARAMETERS if op.parameters else ["none"]):
        if not has_layout(name, dtype) or not op.takes(dtype):
            continue
        input = make_input(name, dtype, device)
        parameters = make_parameters(op, kind, input)
        result = op.result_type(input, *parameters)
        if not op.takes(result):
            continue
        try:
            if (overlaps_itself(input) and input.numel()) or not torch.can_cast(result, dtype):
                check_refused(op, input, *parameters)
                continue
            expected = op.expected(input, *parameters).to(dtype)
            version, strides = input._version, input.stride()
            output = op(input, *parameters, inplace=True)
            assert output is input, "another object came back"
            assert input._version > version, "the version was not counted up"
            signed_zero = not op.name.endswith("relu")
            assert_same(input, expected, strides=strides, signed_zero=signed_zero, **op.tolerance(dtype))
        except Exception as error:
            wrong.append(f"{name} with {kind}: {short(error)}")
        except pytest.fail.Exception as error:
            wrong.append(f"{name} with {kind}: {short(error)}")
    if wrong:
        pytest.fail(f"{len(wrong)} are wrong:\n" + "\n".join(wrong))


VIEWS = {
    "rows": lambda x: x[1:3],
    "columns": lambda x: x[:, 1:4],
    "every second": lambda x: x[:, :, ::2],
    "transposed": lambda x: x.transpose(0, 2)[1:],
    "one": lambda x: x[2, 3, 4],
    "misaligned": lambda x: x.view(-1)[1:],
    "diagonal": lambda x: x.diagonal(0, 0, 2),
}


@pytest.mark.parametrize("view", VIEWS)
@every_op
def test_view_leaves_the_rest_of_its_base_alone(op, view, device):
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        base = data((5, 6, 7), dtype, device)
        expected = base.clone()
        part = VIEWS[view](expected)
        part.copy_(op.expected(part, *arguments(op, 3)))
        op(VIEWS[view](base), *arguments(op, 3), inplace=True)
        assert_same(base, expected, signed_zero=False, **op.tolerance(dtype))


def test_in_place_argument_and_underscore_are_the_same(device):
    for op in OPS.values():
        a, b = data((4, 3), torch.float32, device), None
        b = a.clone()
        assert op.function(a, *arguments(op, 2.0), inplace=True) is a
        assert op.function_(b, *arguments(op, 2.0)) is b
        assert_same(a, b)


# What is refused


@every_op
def test_leaf_that_requires_grad(op, device):
    leaf = data((4, 3), torch.float32, device).requires_grad_()
    factors = (data((3,), torch.float32, device), data((3,), torch.float32, device).requires_grad_(), 2.0)
    for given in factors if op.parameters else (0,):
        check_refused(op, leaf, *arguments(op, given), match="leaf")
        check_refused(op, leaf[1:], *arguments(op, given), match="leaf")
        check_refused(op, leaf.view(2, 2, 3), *arguments(op, given), dim=-1, match="leaf")
        check_refused(op, leaf.unbind(0)[1], *arguments(op, given), dim=-1)
        check_refused(op, leaf.expand(2, 4, 3), *arguments(op, given), dim=-1)
    with torch.no_grad():
        assert op(leaf, *arguments(op, 2.0), inplace=True) is leaf
    assert leaf.is_leaf


@every_op
def test_memory_that_overlaps_itself(op, device):
    for input in (
        data((1,), torch.float32, device).expand(3),
        data((4, 1), torch.bfloat16, device).expand(4, 3),
        data((3,), torch.int64, device).expand(4, 3),
        data((5,), torch.float32, device).as_strided((3, 3), (0, 1)),
    ):
        check_refused(op, input, *arguments(op, 2), match=r"clone\(\)")
        check_refused(op, input, *arguments(op, torch.full((3,), 2, device=device)), dim=-1)
    leaf = data((1, 3), torch.float32, device).requires_grad_()
    check_refused(op, (leaf * 1).expand(3, 3), *arguments(op, 2))


@every_parametrized_op
def test_result_that_the_input_cannot_hold(op, device):
    real = [0.5, torch.tensor(0.5, device=device), torch.full((3,), 0.5, device=device), 1j]
    for input, parameters in (
        (data((4, 3), torch.int32, device), real),
        (data((4, 3), torch.bool, device), [2, *real]),
        (data((4, 3), torch.float32, device), [1j, torch.full((3,), 1j, device=device)]),
    ):
        for parameter in parameters:
            check_refused(op, input, *arguments(op, parameter), match="can|cannot hold|cast")
    floats = data((4, 3), torch.int32, device)
    check_refused(op, floats, *arguments(op, torch.full((3,), 0.5, device=device, requires_grad=True)))


@every_op
def test_inference_tensor(op, device):
    with torch.inference_mode():
        input = data((4, 3), torch.float32, device)
        expected = op.expected(input, *arguments(op, 2.0))
        actual = op(input, *arguments(op, 2.0), inplace=True)
        assert_same(actual, expected, signed_zero=False, **op.tolerance(actual.dtype))
    before = input.clone()
    with pytest.raises(RuntimeError, match="inference"):  # stock notices when it has changed it
        op(input, *arguments(op, 2.0), inplace=True)
    assert_same(input, before)
    assert op(input, *arguments(op, 2.0)).shape == input.shape


@every_parametrized_op
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)], ids=str)
def test_parameter_that_is_the_input(op, shape, device):
    for view in (torch.Tensor.detach, lambda x: x.view(-1)):
        x = data(shape, torch.float32, device)
        target = op.expected(x.clone(), *arguments(op, view(x.clone())))
        assert op(x, *arguments(op, view(x)), inplace=True) is x
        torch.testing.assert_close(x, target)


@every_parametrized_op
def test_parameter_that_is_part_of_the_input(op, device):
    """Right, or refused with nothing changed: each element must see the parameter as it was."""
    for dtype, take in itertools.product(
        (torch.float32, torch.bfloat16),
        (lambda x: x[0], lambda x: x[1, 2], lambda x: x[2, 1:2], lambda x: x.view(-1)[1:4]),
    ):
        input = data((4, 3), dtype, device)
        before, expected = input.clone(), op.expected(input, *arguments(op, take(input)))
        try:
            op(input, *arguments(op, take(input)), inplace=True)
        except RuntimeError:
            assert_same(input, before)
        else:
            assert_same(input, expected, signed_zero=False, **op.tolerance(dtype))


# Gradients


def compare_with_stock(op, program, shape=(4, 3), device="cpu"):
    """program(input, parameter, run) with our operator and with stock's: the same gradients, or an error from both."""
    results = []
    for run in (op, op.stock):
        torch.manual_seed(0)
        input = data(shape, torch.float64, device).requires_grad_()
        parameter = data(shape[1:2], torch.float64, device).requires_grad_()
        loss = (
            program(input, parameter, lambda *args, run=run: run(*arguments_of(op, args), inplace=True)).square().sum()
        )
        try:
            results.append(torch.autograd.grad(loss, [input, parameter], allow_unused=True))
        except RuntimeError as error:
            assert "inplace" in str(error) or "in-place" in str(error), error
            results.append(None)
    return results


def arguments_of(op, args):
    return args[:1] + arguments(op, *(args[1:] or (None,)))


PROGRAMS = {
    "a number": lambda x, p, run: run(x * 1, 3.0),
    "a tensor": lambda x, p, run: run(x * 1, p.detach()),
    "twice": lambda x, p, run: run(run(x * 1, 3.0), 0.5),
    "before relu": lambda x, p, run: torch.relu(run(x * 1, -2.0)),
    "a view": lambda x, p, run: _of_view(x, lambda y: run(y[:, 1:], 3.0)),
    "a transposed view": lambda x, p, run: _of_view(x, lambda y: run(y.t()[1:], 3.0)),
    "a view with a tensor": lambda x, p, run: _of_view(x, lambda y: run(y[1:], p.detach())),
    "a channels-last view": lambda x, p, run: run((x * 1).t(), 3.0),
    "of a constant": lambda x, p, run: run(x.detach() * 1, 3.0) * x,
    "without grad": lambda x, p, run: _without_grad(x, lambda y: run(y, 3.0)),
    "a result that was saved": lambda x, p, run: run(x.exp(), 3.0),  # stock and ours must notice
    "a result that was saved, without grad": lambda x, p, run: _without_grad(x, lambda y: run(y, 3.0), torch.exp),
    "a result that was saved by relu": lambda x, p, run: run(OPS["relu"](x), 3.0),
    "a result that was saved by scale": lambda x, p, run: _saved_by_scale(x, p, run),
}


def _of_view(x, change):
    y = x * 1
    change(y)
    return y


def _without_grad(x, change, before=torch.clone):
    y = before(x)
    with torch.no_grad():
        change(y)
    return y


def _saved_by_scale(x, p, run):
    y = x * 1
    z = OPS["scale"](y, p)  # needs y for the gradient of p
    run(y, 3.0)
    return z


@pytest.mark.parametrize("program", PROGRAMS)
@every_op
def test_gradients_are_those_of_stock(op, program, device):
    ours, stock = compare_with_stock(op, PROGRAMS[program], device=device)
    if stock is None and program == "twice" and op.name == "scale_add_relu":
        return  # saves a mask and not the output, which may change
    assert (ours is None) == (stock is None), (
        f"{'stock' if ours is None else 'ours'} gives a gradient, the other an error"
    )
    for got, expected in zip(ours or (), stock or (), strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


LEARNABLE = {
    "alone": lambda x, p, run: run(x * 1, p),
    "of a constant": lambda x, p, run: run(x.detach() * 1, p),
    "a view": lambda x, p, run: _of_view(x, lambda y: run(y[1:], p)),
    "a view of a constant": lambda x, p, run: _of_view(x.detach(), lambda y: run(y[1:], p)),
    "then in place again": lambda x, p, run: torch.relu_(run(x * 1, p)),
    "one element": lambda x, p, run: run(x * 1, p[:1]),
    "both from one tensor": lambda x, p, run: run(x * 1, x[0]),
}


@pytest.mark.parametrize("program", LEARNABLE)
@every_parametrized_op
def test_learnable_parameter(op, program, device):
    """The right gradient, or an error in backward: never a wrong one, and never none."""

    def out_of_place(x, p, run):
        return LEARNABLE[program](x, p, lambda y, q: y.copy_(op.stock(y.clone(), *arguments(op, q))))

    ours, _ = compare_with_stock(op, LEARNABLE[program], device=device)
    _, expected = compare_with_stock(op, out_of_place, device=device)
    if ours is not None:
        for got, must in zip(ours, expected, strict=True):
            assert (got is None) == (must is None)
            if got is not None:
                torch.testing.assert_close(got, must, rtol=1e-12, atol=1e-12)


def test_half_precision_accumulates_nothing_in_place(device):
    """In place as out of place: one rounding."""
    for op, dtype in itertools.product(OPS.values(), [d for d in COMPUTE if not d.is_complex]):
        input = data((1031,), dtype, device)
        expected = op.expected(input, *arguments(op, 1 / 3))
        actual = op(input, *arguments(op, 1 / 3), inplace=True)
        assert_same(actual, expected, signed_zero=False, **op.tolerance(dtype))
