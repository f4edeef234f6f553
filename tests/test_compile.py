"""torch.compile: one graph, the same results, strides and errors as without, no wrong derivative."""

import copy
import subprocess
import sys

import pytest
import torch
from cases import LAYOUTS, OPS, data
from forms import FORMS, call, each_place, links_by_inductor, make_args, tensors
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vmap

import my_cuda_op.functional as F
from my_cuda_op import nn as mnn

# without the tensor of one element, which differs from one for each channel in nothing that compiling looks at
each_form = pytest.mark.parametrize(
    "op, kind",
    [(op, kind) for op, kind in FORMS if kind != "(1,)"],
    ids=[f"{op.name}-{kind}" for op, kind in FORMS if kind != "(1,)"],
)


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


def compiled(f, **kwargs):
    return torch.compile(f, fullgraph=True, **{"backend": "aot_eager", **kwargs})


def output_and_grads(f, args):
    args = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
    output = f(*args)
    return output, torch.autograd.grad(output.pow(2).sum(), tensors(args))


@each_form
@each_place
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_forward_and_backward(op, kind, inplace, dynamic, device):
    f = compiled(call(op, inplace), dynamic=dynamic)
    for shape in [(2, 3, 4), (5, 3, 7)]:
        args = make_args(op, kind, torch.float32, device, shape, requires_grad=True)
        torch.testing.assert_close(output_and_grads(f, args), output_and_grads(op.expected, args))


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_and_float_parameters(op, kind, dtype, device):
    # in bits: computed in float32 and rounded once, as without compile
    args = make_args(op, kind, dtype, device, parameter_dtype=torch.float32, requires_grad=True)
    actual, target = output_and_grads(compiled(op), args), output_and_grads(op.expected, args)
    assert [a.dtype for a in actual[1]] == [a.dtype for a in tensors(args)]
    torch.testing.assert_close(actual[0], target[0], rtol=0, atol=0)
    torch.testing.assert_close(actual[1], target[1])


def everything(x, s, a, w, b):
    """All operators in all forms, in one graph; and in place, where the returned value is dropped."""
    y = F.scale(F.add_scalar(F.relu(x), a), s)
    y = F.scale(F.add_scalar(y, b), w)
    F.add_scalar_(y, 1.0)
    F.scale_(y, w)
    F.relu_(y)
    return y


def stock(x, s, a, w, b):
    w, b = w[:, None], b[:, None]
    return ((((x.relu() + a) * s + b) * w + 1.0) * w).relu()


def arguments(device):
    x, w, b = [data(shape, torch.float32, device).requires_grad_() for shape in [(2, 3, 4), (3,), (3,)]]
    return [x, 0.5, 2, w, b]


@links_by_inductor
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_inductor(dynamic, device):
    f, args = compiled(everything, backend="inductor", dynamic=dynamic), arguments(device)
    torch.testing.assert_close(output_and_grads(f, args), output_and_grads(stock, args))
    transposed = [args[0].detach().mT.contiguous().mT, *args[1:]]
    assert f(*transposed).stride() == everything(*transposed).stride() == (12, 1, 3)


def test_reduce_overhead(cuda):
    f, args = compiled(everything, backend="inductor", mode="reduce-overhead"), arguments(cuda)
    for _ in range(4):  # warm up, capture, replay
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(output_and_grads(f, args), output_and_grads(stock, args))


@each_form
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "permuted", "every_second", "expanded_leading"])
def test_strides_are_those_without_compile(op, kind, layout, device):
    x = LAYOUTS[layout]((2, 3, 4, 5), torch.float32, device)
    args = [x, *make_args(op, kind, torch.float32, device)[1:]]
    assert compiled(op)(*args).stride() == op(*args).stride() == op.stock(*args).stride()


@each_form
@pytest.mark.parametrize("view", [False, True], ids=["argument", "view of an argument"])
def test_in_place_with_the_returned_value_dropped(op, kind, view, device):
    args = make_args(op, kind, torch.float32, device)

    def change(x, *parameters):
        op(x[0] if view else x, *parameters, dim=0 if view else 1, inplace=True)

    x = args[0].clone()
    compiled(change)(x, *args[1:])
    target = args[0].clone()
    change(target, *args[1:])
    torch.testing.assert_close(x, target, **(op.tolerance(x.dtype) or {"rtol": 0, "atol": 0}))
    assert not x.equal(args[0])


@each_form
def test_in_place_of_a_leaf_is_refused(op, kind, device):
    args = make_args(op, kind, torch.float32, device, requires_grad=True)
    before = args[0].detach().clone()
    with pytest.raises(Exception, match="leaf"):
        compiled(lambda *a: op(*a, inplace=True))(*args)
    assert args[0].equal(before)


# Recompilations


def graphs(f, calls):
    counter = CompileCounterWithBackend("eager")
    f = torch.compile(f, backend=counter, fullgraph=True)
    for args in calls:
        f(*args)
    return counter.frame_count


NUMBERS = {"floats": [0.5, 1.5, 2.5, 3.5], "ints": [2, 3, 4, 5], "both": [1, 0.5, 2, 1.5], "bools": [True, False]}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("op", [op for op in OPS.values() if op.parameters], ids=lambda op: op.name)
def test_a_changing_number_recompiles_no_more_than_stock(op, numbers, device):
    x = data((2, 3), torch.float32, device)
    calls = [(x, *[number] * len(op.parameters)) for number in NUMBERS[numbers]]
    ours = graphs(op, calls)
    torch.compiler.reset()
    assert ours <= graphs(op.stock, calls)


@each_form
def test_a_changing_tensor_does_not_recompile(op, kind, device):
    calls = [make_args(op, kind, torch.float32, device) for _ in range(4)]
    assert graphs(op, [[*call[:1], *calls[0][1:]] if kind == "float" else call for call in calls]) == 1


def test_layers_with_different_numbers_share_no_state():
    model = nn.Sequential(*[mnn.Scale(s) for s in (0.5, 2.0, 3.0)], mnn.AddScalar(1.0), mnn.ReLU())
    x = data((2, 3), torch.float32)
    assert graphs(model, [(x,), (x,)]) == 1
    torch.testing.assert_close(compiled(model)(x), (x * 3 + 1).relu())
    model[0].weight = 4.0
    torch.testing.assert_close(compiled(model)(x), (x * 24 + 1).relu())


def layers():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        mnn.Scale(0.5, num_channels=3),
        mnn.AddScalar(num_channels=3),
        mnn.ReLU(),
        mnn.AddScalar(learnable=True),
        mnn.Scale(2.0, inplace=True),
        mnn.ReLU(inplace=True),
    )


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=links_by_inductor)])
def test_training_step_of_layers(backend, device):
    model, x = layers().to(device), data((2, 2, 6, 6), torch.float32, device)
    twin = copy.deepcopy(model)
    for m, run in ((model, model), (twin, compiled(twin, backend=backend))):
        optimizer = torch.optim.SGD(m.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            run(x).pow(2).mean().backward()
            optimizer.step()
    torch.testing.assert_close(dict(twin.named_parameters()), dict(model.named_parameters()))


# Derivatives inside of a compiled function: right, never silent zeros


def total(f):
    return lambda *a: f(*a).pow(3).sum()


def every(a):
    return tuple(range(len(a)))


def flipped(a):
    return tuple(x.flip(0) for x in a)


def dual(f, a):
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(a, flipped(a), strict=True)]
        primal, tangent = forward_ad.unpack_dual(f(*duals))
        return primal.clone(), tangent.clone()


TRANSFORMS = {
    "grad": lambda f, a: grad(total(f), every(a))(*a),
    "jvp": lambda f, a: jvp(f, a, flipped(a)),
    # one argument at a time: torch 2.11 compiles no hessian of two arguments, of stock functions neither
    "hessian": lambda f, a: [hessian(total(f), i)(*a) for i in every(a)],
    "vmap": lambda f, a: vmap(lambda x: f(x[None], *a[1:]))(a[0]),
    "vmap of grad": lambda f, a: vmap(lambda x: grad(total(f), every(a))(x[None], *a[1:]))(a[0]),
    "dual": dual,
}


@each_form
@each_place
def test_transforms_inside(op, kind, inplace, device):
    if inplace and kind == "float":
        pytest.skip("as with a tensor; and compiling takes long")
    args = make_args(op, kind, torch.float64, device)
    given, numbers = tuple(tensors(args)), [a for a in args if not isinstance(a, torch.Tensor)]

    def run(f):  # all in one graph, for compiling takes long
        return lambda *a: {name: t(lambda *b: f(*b, *numbers), a) for name, t in TRANSFORMS.items()}

    torch.testing.assert_close(compiled(run(call(op, inplace)))(*given), run(op.expected)(*given))


def test_transforms_of_dispatcher_ops_inside(device):
    ops, x, w = torch.ops.my_cuda_op, data((2, 3), torch.float64, device), data((3,), torch.float64, device)
    for f, stock in [
        (lambda x, w: ops.scale(x, w), lambda x, w: x * w),
        (lambda x, w: ops.relu(ops.add_scalar(x, w)), lambda x, w: (x + w).relu()),
    ]:

        def run(f):
            return lambda *a: {name: t(f, a) for name, t in TRANSFORMS.items()}

        torch.testing.assert_close(compiled(run(f))(x, w), run(stock)(x, w))


# What some torch cannot compile, of stock functions neither. In a process of its own: a failure leaves forward mode on.
NESTED = {
    "hessian of two arguments": "hessian(f, (0, 1))(x, w)",
    "vmap of hessian": "vmap(hessian(f), (0, None))(torch.stack([x, -x]), w)",
    "hessian of hessian": "hessian(hessian(f, 1), 1)(x, w)",
}
PROGRAM = """
import sys, torch
from torch.func import hessian, vmap
import my_cuda_op.functional as F
def ours(x, w): return F.relu(F.scale(x, w)).pow(5).sum()
def stock(x, w): return (x * w[:, None]).relu().pow(5).sum()
x, w = torch.randn(2, 3, 2, dtype=torch.float64), torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
f = {name}
def run(x, w): return {transform}
try:
    actual = torch.compile(run, backend="aot_eager", fullgraph=True)(x, w)
except Exception as error:
    sys.exit(f"not compiled: {{error}}")
f = stock
torch.testing.assert_close(actual, run(x, w))
"""


@pytest.mark.parametrize("transform", NESTED)
def test_nested_transforms_inside_as_far_as_stock(transform):
    def run(name):
        program = PROGRAM.format(name=name, transform=NESTED[transform])
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/")

    done = run("ours")
    if "not compiled" in done.stderr and "not compiled" in run("stock").stderr:
        pytest.xfail("stock functions are not compiled either")
    assert done.returncode == 0, done.stderr
