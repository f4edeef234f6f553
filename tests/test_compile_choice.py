"""compile_with("kernels"): compiled code runs our kernels, forward and backward, and is as right as without them."""

import io
import itertools

import pytest
import torch
from cases import LAYOUTS, OPS, data
from forms import call, links_by_inductor, make_args
from test_compile import TRANSFORMS, compiled, each_form, layers, output_and_grads
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.testing._internal.two_tensor import TwoTensor

import my_cuda_op
import my_cuda_op.functional as F
from my_cuda_op import nn as mnn

# with one parameter for each channel: for what differs between operators, and not between parameters
each_op = pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))


@pytest.fixture(autouse=True)
def kernels():
    torch.compiler.reset()
    with my_cuda_op.compile_with("kernels"):
        yield


def targets(graphs):
    """What the graphs call, as names without overloads: {"my_cuda_op.scale", "aten.copy_"}."""
    nodes = itertools.chain(*[graph.graph.nodes for graph in graphs])
    names = {str(node.target) for node in nodes if node.op in ("call_function", "call_method")}
    return {".".join(name.split(".")[:2]) for name in names}


class Recorder(AotEagerAndRecordGraphs):
    @property
    def ours(self):
        return [{n for n in targets(graphs) if "my_cuda_op" in n} for graphs in (self.fw_graphs, self.bw_graphs)]

    @property
    def others(self):
        """Of those that compute: not what tells the backward of shapes and strides."""
        idle = {"aten.empty", "aten.expand", "aten.detach", "aten.sym_stride", "aten.sym_size"}
        names = targets(self.fw_graphs + self.bw_graphs) - idle
        return {name for name in names if not name.startswith(("my_cuda_op", "<built-in function"))}


BACKWARD = {"relu": {"relu_backward"}, "scale_add": {"scale_add_backward"}, "scale_add_relu": {"scale_add_backward"}}
BACKWARD |= {"scale": {"scale_add_backward"}, "add_scalar": {"add_scalar_backward_value"}}
BACKWARD_OF_A_NUMBER = {**BACKWARD, "scale": {"scale"}, "add_scalar": set()}


@each_form
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_forward_and_backward_are_our_operators(op, kind, dynamic, device):
    graphs = Recorder()
    f, shapes = compiled(op, backend=graphs, dynamic=dynamic), [(2, 3, 4), (5, 3, 7)]
    for shape in shapes:
        args = make_args(op, kind, torch.float32, device, shape, requires_grad=True)
        torch.testing.assert_close(output_and_grads(f, args), output_and_grads(op.expected, args))
    backward = (BACKWARD_OF_A_NUMBER if kind == "float" else BACKWARD)[op.name]
    assert graphs.ours == [{"my_cuda_op." + op.recorded}, {"my_cuda_op." + name for name in backward}]
    assert not graphs.others
    if dynamic and kind != "float":
        assert len(graphs.graphs) == 1


@each_op
def test_without_grad(op, device):
    graphs, args = Recorder(), make_args(op, "per channel", torch.float32, device)
    torch.testing.assert_close(compiled(op, backend=graphs)(*args), op.expected(*args))
    assert targets(graphs.graphs) == {"my_cuda_op." + op.name}


@pytest.mark.parametrize("function", [F.scale_add, F.scale_add_relu], ids=lambda f: f.__name__)
def test_residual(function, device):
    x, w, b, r = (data(s, torch.float32, device).requires_grad_() for s in [(2, 3, 4), (3,), (3,), (2, 3, 4)])
    graphs = Recorder()
    run = compiled(lambda x, w, b, r: function(x, w, b, residual=r), backend=graphs)
    stock = nn.Identity() if function is F.scale_add else torch.relu
    actual = output_and_grads(run, [x, w, b, r])
    target = output_and_grads(lambda x, w, b, r: stock(x * w[:, None] + b[:, None] + r), [x, w, b, r])
    torch.testing.assert_close(actual, target)
    assert not graphs.others


@each_form
def test_half_precision_and_float_parameters(op, kind, device):
    args = make_args(op, kind, torch.bfloat16, device, parameter_dtype=torch.float32, requires_grad=True)
    actual, target = output_and_grads(compiled(op), args), output_and_grads(op.expected, args)
    torch.testing.assert_close(actual[0], target[0], rtol=0, atol=0)
    torch.testing.assert_close(actual[1], target[1])


@each_op
@pytest.mark.parametrize("layout", ["channels_last", "permuted", "every_second", "expanded_leading"])
def test_layouts(op, layout, device):
    x = LAYOUTS[layout]((2, 3, 4, 5), torch.float32, device).requires_grad_()
    args = [x, *make_args(op, "per channel", torch.float32, device, requires_grad=True)[1:]]
    (output, grads), (must, must_grads) = (output_and_grads(f, args) for f in (compiled(op), op))
    assert output.stride() == must.stride()
    torch.testing.assert_close([output, *grads], [must, *must_grads])


@each_op
def test_transforms_inside(op, device):
    args = make_args(op, "per channel", torch.float64, device)

    def run(f):  # all in one graph, for compiling takes long
        return lambda *a: {name: transform(f, a) for name, transform in TRANSFORMS.items()}

    torch.testing.assert_close(compiled(run(op))(*args), run(op.expected)(*args))


@each_op
def test_in_place(op, device):
    args = make_args(op, "per channel", torch.float32, device, requires_grad=True)
    torch.testing.assert_close(output_and_grads(compiled(call(op, True)), args), output_and_grads(op.expected, args))
    x, *parameters = [a.detach() for a in args]
    before = x.clone()
    compiled(lambda x: op(x, *parameters, inplace=True) is None)(x)
    torch.testing.assert_close(x, op.expected(before, *parameters))


@each_op
def test_tensors_that_wrap_others_get_what_they_know(op):
    graphs, (x, *parameters) = Recorder(), make_args(op, "per channel", torch.float32)
    output = compiled(op, backend=graphs)(TwoTensor(x, -x), *parameters)
    torch.testing.assert_close((output.a, output.b), (op.expected(x, *parameters), op.expected(-x, *parameters)))
    assert not graphs.ours[0]  # which has no rule for DTensor


@links_by_inductor
@pytest.mark.parametrize(
    "memory_format, dynamic",
    [(torch.channels_last, False), (torch.contiguous_format, True)],
    ids=["channels_last, static", "contiguous, dynamic"],
)
def test_inductor(memory_format, dynamic, device):
    model = nn.Sequential(layers(), mnn.ScaleAddReLU(num_channels=3), mnn.ScaleAdd(2.0, 0.5)).to(device)
    model, run = model.to(memory_format=memory_format), compiled(model, backend="inductor", dynamic=dynamic)
    for batch in (2, 5):
        x = data((batch, 2, 6, 6), torch.float32, device).to(memory_format=memory_format)
        outputs = [f(x) for f in (run, model)]
        grads = [torch.autograd.grad(output.pow(2).sum(), list(model.parameters())) for output in outputs]
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*grads)
        assert outputs[0].stride() == outputs[1].stride()


def test_reduce_overhead(cuda):
    def f(x, w, b):
        return F.scale_add_relu(F.relu(F.scale(x, w)), w, b)

    args = [data(shape, torch.float32, cuda).requires_grad_() for shape in [(2, 3, 4), (3,), (3,)]]
    run = compiled(f, backend="inductor", mode="reduce-overhead")
    for _ in range(4):  # warm up, capture, replay
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(output_and_grads(run, args), output_and_grads(f, args))


@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_export(strict, device):
    model = nn.Sequential(mnn.ScaleAddReLU(num_channels=3), mnn.Scale(2.0), mnn.ReLU(inplace=True)).to(device)
    x = data((2, 3, 4), torch.float32, device)
    program = torch.export.export(model, (x,), strict=strict)
    assert {"my_cuda_op." + name for name in ("scale_add_relu", "scale", "relu")} <= targets([program])
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    torch.testing.assert_close(torch.export.load(file).module()(x), model(x))


# The choice itself


def test_a_change_of_the_choice_compiles_again():
    graphs, x = Recorder(), data((2, 3), torch.float32)
    f = compiled(lambda x: F.scale(x, 2.0), backend=graphs)
    f(x)
    with my_cuda_op.compile_with("decomposition"):
        f(x)
        f(x)
    f(x)
    assert [targets([graph]) for graph in graphs.fw_graphs] == [{"my_cuda_op.scale"}, {"aten.mul"}]


def test_a_choice_inside_of_what_is_compiled():
    def f(x):
        with my_cuda_op.compile_with("decomposition"):
            y = F.scale(x, 2.0)
        return F.relu(y)

    graphs, x = Recorder(), data((2, 3), torch.float32)
    torch.testing.assert_close(compiled(f, backend=graphs)(x), f(x))
    assert targets(graphs.fw_graphs) == {"aten.mul", "my_cuda_op.relu"}


def test_the_choice_holds_until_the_block_ends():
    graphs, x = Recorder(), data((2, 3), torch.float32)

    def ours():
        torch.compiler.reset()
        graphs.fw_graphs.clear()
        compiled(F.relu, backend=graphs)(x)
        return targets(graphs.fw_graphs) == {"my_cuda_op.relu"}

    with my_cuda_op.compile_with("decomposition"):
        assert not ours()
        with pytest.raises(KeyError), my_cuda_op.compile_with("kernels"):
            assert ours()
            raise KeyError
        assert not ours()
        my_cuda_op.compile_with("kernels")
        assert ours()
    assert ours()


def test_a_block_may_be_entered_again():
    with my_cuda_op.compile_with("decomposition"):
        choice = my_cuda_op.compile_with("kernels")
        for _ in range(2):
            with choice:
                assert my_cuda_op.routing._kernels
            assert not my_cuda_op.routing._kernels


def test_a_choice_for_the_calls_of_a_function():
    graphs, x = Recorder(), data((2, 3), torch.float32)

    @my_cuda_op.compile_with("decomposition")
    def f(x, *, factor):
        """Doubles."""
        return F.scale(x, factor)

    assert my_cuda_op.routing._kernels  # as before the decorator
    assert (f.__name__, f.__doc__) == ("f", "Doubles.")
    torch.testing.assert_close(compiled(f, backend=graphs)(x, factor=2.0), x * 2)
    assert targets(graphs.fw_graphs) == {"aten.mul"}
    f(x, factor=2.0)
    with pytest.raises(TypeError):
        f(x)
    assert my_cuda_op.routing._kernels


def test_another_choice_is_refused():
    with pytest.raises(ValueError, match="must be 'decomposition' or 'kernels', got 'inductor'"):
        my_cuda_op.compile_with("inductor")
    assert my_cuda_op.routing._kernels  # as before
