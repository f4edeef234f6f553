"""The graph that a call records: as alive, as frugal and as strict as a stock operator's."""

import gc
import itertools
import re
import subprocess
import sys
import weakref

import pytest
import torch
from cases import OPS
from forms import each_form, make_args, tensors
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import my_cuda_op.functional as F

# What is saved of an input and parameters that are numbers, and that are tensors; all of them want a gradient.
SAVED = {
    "scale": ([], ["input", "factor"]),
    "add_scalar": ([], []),
    "relu": (["output"], None),
    "scale_add": ([], ["input", "factor"]),
    "scale_add_relu": (["mask"], ["input", "mask", "factor"]),
}


def recorded(op, kind, device):
    args = make_args(op, kind, device=device, requires_grad=True)
    return args, op(*args)


@each_form
def test_second_backward_needs_retain_graph(op, kind, device):
    args, y = recorded(op, kind, device)
    first = torch.autograd.grad(y.sum(), tensors(args), retain_graph=True)
    second = torch.autograd.grad(y.sum(), tensors(args))
    assert all(map(torch.equal, first, second))
    if SAVED[op.name][len(tensors(args)) > 1]:
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.sum().backward()


@each_form
def test_forgets_what_it_saved_as_soon_as_it_is_done(op, kind, device):
    class Box:
        def __init__(self, tensor):
            self.tensor = tensor.detach()  # an output that a hook keeps is a cycle, in stock PyTorch too

    boxes = []

    def pack(tensor):
        box = Box(tensor)
        boxes.append(weakref.ref(box))
        return box

    gc.disable()
    try:
        for finish in [lambda y: y.sum().backward(), lambda y: None]:  # by backward; because nobody wants it
            boxes.clear()
            with saved_tensors_hooks(pack, lambda box: box.tensor):
                args, y = recorded(op, kind, device)
            assert len(boxes) == len(SAVED[op.name][len(tensors(args)) > 1])
            assert all(box() is not None for box in boxes)
            finish(y)
            del y
            assert all(box() is None for box in boxes)
    finally:
        gc.enable()


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@each_form
def test_second_derivatives_reach_what_stocks_reach(op, kind, residual, device):
    if residual and not op.rounds_once:
        pytest.skip("has no residual")
    args = make_args(op, kind, device=device, requires_grad=True)
    given = tensors(args) + [torch.rand_like(args[0]).requires_grad_()] * residual

    def ours():
        return op.function(*args, residual=given[-1]) if residual else op(*args)

    def stock():
        if not residual:
            return op.stock(*args)
        affine = OPS["scale_add"].stock(*args) + given[-1]
        return affine.relu() if op.name == "scale_add_relu" else affine

    def second(f, i, j):
        (first,) = torch.autograd.grad(f().sum(), given[i], create_graph=True)
        try:
            return torch.autograd.grad(first.sum(), given[j])[0]
        except RuntimeError as error:
            assert re.search("not have been used in the graph|does not require grad", str(error))
            return None

    for i, j in itertools.product(range(len(given)), repeat=2):
        actual, target = second(ours, i, j), second(stock, i, j)
        if op.name == "scale_add_relu" and actual is None and target is not None:
            target = None if not target.any() else target  # the mask has no graph: an error, where stock has zeros
        assert (actual is None) == (target is None), (i, j)
        if actual is not None:
            torch.testing.assert_close(actual, target)


@each_form
@pytest.mark.parametrize("needed", ["value", "residual"])
def test_factor_that_no_derivative_needs_may_change(op, kind, needed, device):
    if len(op.parameters) < 2 or (kind == "float" and needed == "value"):
        pytest.skip("the op has no value, or no tensor of it")
    x, factor, value = make_args(op, kind, device=device)
    residual = {"residual": x + 0.25}
    target = value if needed == "value" else residual["residual"]
    y = op(
        x,
        factor,
        value.requires_grad_() if needed == "value" else value,
        residual=residual["residual"].requires_grad_(),
    )
    expected = torch.autograd.grad(op.stock(x, factor, value, **residual).sum(), target)
    if isinstance(factor, torch.Tensor):
        factor.mul_(-2)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), target), expected)


def test_exception_of_an_unpack_hook_arrives_as_it_is(device):
    class MyError(Exception):
        pass

    def unpack(_):
        raise MyError("lost")

    x = torch.ones(3, device=device, requires_grad=True)
    with saved_tensors_hooks(lambda t: t, unpack):
        y = F.relu(x)
    with pytest.raises(MyError, match="lost"):
        y.sum().backward()


class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_computes_only_the_gradients_that_are_asked_for(device):
    x, w = torch.ones(2, 3, device=device, requires_grad=True), torch.ones(3, device=device, requires_grad=True)
    for inputs, ours in [([x], ["scale"]), ([w], ["scale_backward_factor"]), ([x, w], ["scale_add_backward"])]:
        y = F.scale(x, w)
        with Log() as log:
            torch.autograd.grad(y, inputs, torch.ones_like(y))
        assert [name for name in log.names if name.startswith("scale")] == ours


def test_long_chain_needs_no_deep_stack():
    x = y = torch.ones(1, requires_grad=True)
    for _ in range(30_000):
        y = F.scale(y, 1.0)
    y.backward()
    assert x.grad == 1
    y = F.scale(x, 1.0)
    for _ in range(30_000):
        y = F.relu(y)
    del y


def test_program_ends_with_a_graph_alive():
    program = "import torch, my_cuda_op as m; y = m.relu(m.scale(torch.ones(3, requires_grad=True), 2.0)); print('ok')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_compiled_autograd_of_a_recorded_call_says_what_to_do():
    from torch._dynamo import compiled_autograd

    y = F.relu(torch.ones(3, requires_grad=True)).sum()
    error = pytest.raises(NotImplementedError, match=r"ReLUBackward, .* recorded outside torch\.compile")
    with error, compiled_autograd._enable(torch.compile(backend="eager")):
        y.backward()


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "node_creation_hook"), reason="new in torch 2.14")
def test_node_creation_hook_sees_the_whole_node():
    seen = []
    with torch.autograd.graph.node_creation_hook(lambda node: seen.append(node.name())):
        F.relu(torch.ones(3, requires_grad=True))
    assert "ReLUBackward" in seen
