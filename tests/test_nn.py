"""Layers: what they hold in each form, and all that PyTorch does to a module."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from cases import OPS, data
from torch import nn

import my_cuda_op.functional as F
from my_cuda_op import nn as mnn

# (layer, its op, its arguments for an op's parameters and their states' names)
LAYERS = {
    "Scale": (mnn.Scale, "scale", {"factor": "weight"}),
    "AddScalar": (mnn.AddScalar, "add_scalar", {"value": "bias"}),
    "ReLU": (mnn.ReLU, "relu", {}),
    "ScaleAdd": (mnn.ScaleAdd, "scale_add", {"factor": "weight", "value": "bias"}),
    "ScaleAddReLU": (mnn.ScaleAddReLU, "scale_add_relu", {"factor": "weight", "value": "bias"}),
}
TENSOR = torch.tensor([0.5, -1.5, 2.5])
# name: (the number or tensor given, what else is given, what it is held as)
FORMS = {
    "number": (-0.5, {}, "number"),
    "int": (3, {}, "number"),
    "learnable": (-0.5, {"learnable": True}, "parameter"),
    "per channel": (-0.5, {"num_channels": 3}, "parameter"),
    "fixed per channel": (-0.5, {"num_channels": 3, "learnable": False}, "buffer"),
    "tensor": (TENSOR, {}, "buffer"),
    "0-d tensor": (torch.tensor(0.5), {}, "buffer"),
    "learnable tensor": (TENSOR, {"learnable": True}, "parameter"),
    "learnable 0-d tensor": (torch.tensor(0.5), {"learnable": True}, "parameter"),
}
CASES = [(name, form) for name, (_, _, states) in LAYERS.items() for form in (FORMS if states else ["number"])]
each_layer = pytest.mark.parametrize("name, form", CASES, ids=["-".join(case) for case in CASES])


def make(name, form, **kwargs):
    layer, _, states = LAYERS[name]
    value, form_kwargs, _ = FORMS[form]
    if not states:
        return layer(**{k: v for k, v in kwargs.items() if k == "inplace"})
    return layer(**dict.fromkeys(states, value), **form_kwargs, **kwargs)


def held(layer, name):
    return [getattr(layer, state) for state in LAYERS[name][2].values()]


def expected(layer, name, x):
    return OPS[LAYERS[name][1]].expected(x, *held(layer, name))


def input(device="cpu", dtype=torch.float32):
    return data((2, 3, 4), dtype, device)


def test_every_layer_and_every_op_is_here():
    assert set(LAYERS) == set(mnn.__all__)
    assert {op for _, op, _ in LAYERS.values()} == set(OPS)


@each_layer
def test_what_it_holds(name, form):
    layer = make(name, form)
    value, kwargs, kind = FORMS[form]
    states = set(LAYERS[name][2].values())
    channels = kwargs.get("num_channels") or (value.numel() if isinstance(value, torch.Tensor) else 1)
    assert {n for n, _ in layer.named_parameters()} == (states if kind == "parameter" else set())
    assert {n for n, _ in layer.named_buffers()} == (states if kind == "buffer" else set())
    assert set(layer.state_dict()) == (set() if kind == "number" else states)
    for state in held(layer, name):
        if kind == "number":
            assert state is value  # exact, and an int stays one
        else:
            assert state.shape == (channels,)
            assert state.requires_grad == (kind == "parameter")
            assert (state == value).all()
            assert not isinstance(value, torch.Tensor) or state.data_ptr() != value.data_ptr()


@pytest.mark.parametrize("name", [name for name, (_, _, states) in LAYERS.items() if states])
def test_a_parameter_that_is_given_is_the_one_that_is_held(name):
    layer, _, states = LAYERS[name]
    for given in (nn.Parameter(TENSOR.clone()), nn.Parameter(torch.tensor(0.5)), nn.Parameter(TENSOR.clone(), False)):
        made = [layer(**dict.fromkeys(states, given), **kwargs) for kwargs in ({}, {"learnable": True})]
        for state in states.values():
            assert all(made.get_parameter(state) is given for made in made)
        assert "learnable=True" in repr(made[0])
        wider = layer(**dict.fromkeys(states, given), dtype=torch.float64)
        buffer = layer(**dict.fromkeys(states, given), learnable=False)
        for state in states.values():
            assert wider.get_parameter(state).dtype == torch.float64
            assert wider.get_parameter(state).requires_grad == given.requires_grad
            assert not buffer.get_buffer(state).requires_grad
    tensor = TENSOR.clone().requires_grad_()
    parameters = list(layer(**dict.fromkeys(states, tensor)).parameters())
    assert len(parameters) == len(states) and all(p.equal(tensor) and p.requires_grad for p in parameters)


def test_each_parameter_is_held_by_what_it_is():
    layer = mnn.ScaleAdd(nn.Parameter(TENSOR.clone()), 0.5)
    assert [n for n, _ in layer.named_parameters()] == ["weight"] and layer.bias == 0.5
    assert repr(layer) == "ScaleAdd(value=0.5, num_channels=3, learnable=True, dim=1)"


def test_integers_of_numpy():
    layer = mnn.Scale(num_channels=np.int64(3), dim=np.int32(-1))
    assert (type(layer.num_channels), type(layer.dim), layer.weight.shape) == (int, int, (3,))


@each_layer
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in place"])
def test_forward_and_backward(name, form, inplace, device):
    layer = make(name, form, inplace=inplace).to(device)
    leaf = input(device).requires_grad_()
    x = leaf.clone()
    target = expected(layer, name, leaf)
    output = layer(x)
    assert (output is x) == inplace
    torch.testing.assert_close(output, target)
    wanted = [leaf, *layer.parameters()]
    grads = [torch.autograd.grad(y.pow(2).sum(), wanted) for y in (output, target)]
    torch.testing.assert_close(*grads)


@each_layer
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), copy.copy])
def test_copies(name, form, copied):
    layer = make(name, form, inplace=True)
    twin = copied(layer)
    assert repr(twin) == repr(layer)
    x = input()
    torch.testing.assert_close(twin(x.clone()), expected(layer, name, x))
    if copied is not copy.copy:
        for a, b in zip(layer.state_dict().values(), twin.state_dict().values(), strict=True):
            assert a.data_ptr() != b.data_ptr()


@each_layer
def test_state_dict_round_trip(name, form):
    layer, file = make(name, form), io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = make(name, form)
    with torch.no_grad():
        for state in other.state_dict().values():
            state.fill_(7)
    assert other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    x = input()
    assert other(x).equal(layer(x))


@each_layer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_to_dtype(name, form, dtype, device):
    layer = make(name, form).to(device)
    layer = layer.half() if dtype == torch.float16 else layer.to(dtype)
    assert all(state.dtype == dtype for state in layer.state_dict().values())
    x = input(device, dtype)
    tolerance = OPS[LAYERS[name][1]].tolerance(dtype) or {"rtol": 0, "atol": 0}
    torch.testing.assert_close(layer(x), expected(layer, name, x), **tolerance)


@each_layer
def test_meta_and_back(name, form):
    layer = make(name, form).to("meta")
    output = layer(input("meta"))
    assert output.is_meta and output.shape == (2, 3, 4)
    layer.to_empty(device="cpu")
    if form.endswith("tensor"):  # which has nothing to reset to
        layer.load_state_dict(make(name, form).state_dict())
    if hasattr(layer, "reset_parameters"):
        layer.reset_parameters()
    x = input()
    torch.testing.assert_close(layer(x), make(name, form)(x))


@each_layer
def test_device_and_dtype(name, form, device):
    if not LAYERS[name][2]:
        with pytest.raises(TypeError, match="unexpected keyword"):
            LAYERS[name][0](dtype=torch.float64)
        return
    layer = make(name, form, device=device, dtype=torch.float64)
    for state in layer.state_dict().values():
        assert state.dtype == torch.float64 and state.device.type == device
    with torch.device("meta"):
        assert all(state.is_meta for state in make(name, "per channel").state_dict().values())
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert make(name, "per channel").state_dict()[next(iter(LAYERS[name][2].values()))].dtype == torch.float64
    finally:
        torch.set_default_dtype(default)


REPRS = [
    (mnn.Scale(np.float32(0.5)), "Scale(factor=0.5)"),
    (mnn.Scale(2), "Scale(factor=2)"),
    (mnn.Scale(0.1, inplace=True), "Scale(factor=0.1, inplace=True)"),
    (mnn.Scale(num_channels=3, dim=-1), "Scale(num_channels=3, learnable=True, dim=-1)"),
    (mnn.AddScalar(learnable=True), "AddScalar(num_channels=1, learnable=True, dim=1)"),
    (mnn.AddScalar(TENSOR), "AddScalar(num_channels=3, learnable=False, dim=1)"),
    (mnn.ReLU(), "ReLU()"),
    (mnn.ReLU(inplace=True), "ReLU(inplace=True)"),
]


@pytest.mark.parametrize("layer, text", REPRS, ids=[text for _, text in REPRS])
def test_repr(layer, text):
    assert repr(layer) == text


ERRORS = {
    "a wrong shape": (
        lambda: mnn.Scale(TENSOR, num_channels=4),
        ValueError,
        r"Scale: factor must have shape \(4,\), got \(3,\)",
    ),
    "two dimensions": (
        lambda: mnn.AddScalar(torch.ones(2, 2)),
        ValueError,
        r"value must have shape .* got \(2, 2\)",
    ),
    "a string": (lambda: mnn.Scale("2"), TypeError, "factor must be a number or a Tensor"),
    "a string, learnable": (
        lambda: mnn.Scale("2", learnable=True),
        TypeError,
        "factor must be a number or a Tensor",
    ),
    "learnable, but how?": (lambda: mnn.Scale(learnable="yes"), TypeError, "learnable must be a bool or None, got str"),
    "half a channel": (lambda: mnn.Scale(num_channels=1.5), TypeError, "num_channels must be an int, got float"),
    "no channels": (lambda: mnn.Scale(num_channels=0), ValueError, "num_channels must be"),
    "a positional flag": (lambda: mnn.Scale(1.0, 3), TypeError, "positional"),
    "an integer to learn": (lambda: mnn.Scale(torch.tensor([1]), learnable=True), RuntimeError, "floating point"),
    "channels that do not fit": (
        lambda: mnn.Scale(num_channels=4)(input()),
        RuntimeError,
        r"scale: factor must have 1 or 3 elements \(input.size\(1\)\), got 4",
    ),
    "a leaf in place": (lambda: mnn.ReLU(inplace=True)(input().requires_grad_()), RuntimeError, "leaf"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error):
    call, kind, message = ERRORS[error]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("name", [name for name, (_, _, states) in LAYERS.items() if states])
def test_dim(name, dim, device):
    x = input(device)
    layer = make(name, "number", num_channels=x.size(dim), dim=dim).to(device)
    nn.init.normal_(next(layer.parameters()))
    torch.testing.assert_close(layer(x), OPS[LAYERS[name][1]].expected(x, *layer.parameters(), dim=dim))


@each_layer
def test_fx_symbolic_trace(name, form):
    model = nn.Sequential(nn.Linear(4, 4), make(name, form))
    traced = torch.fx.symbolic_trace(model)
    called = {node.target for node in traced.graph.nodes if node.op == "call_function"}
    assert getattr(F, LAYERS[name][1]) in called  # the op is one node
    x = input()
    torch.testing.assert_close(traced(x), model(x))
    torch.testing.assert_close(copy.deepcopy(traced)(x), model(x))


@each_layer
def test_full_backward_hook(name, form):
    layer, seen = make(name, form), []
    layer.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append((grad_input, grad_output)))
    x, grad = input().requires_grad_(), input()
    layer(x).backward(grad)
    ((grad_input,), (grad_output,)) = seen[0]
    assert len(seen) == 1 and grad_output.equal(grad)
    torch.testing.assert_close(grad_input, x.grad)


def test_parametrization():
    class Exp(nn.Module):
        def forward(self, x):
            return x.exp()

    layer = mnn.Scale(0.5, num_channels=3)
    nn.utils.parametrize.register_parametrization(layer, "weight", Exp())
    x = input()
    output = layer(x)
    torch.testing.assert_close(output, x * torch.tensor(0.5).exp())
    output.sum().backward()
    torch.testing.assert_close(layer.parametrizations.weight.original.grad, x.sum((0, 2)) * torch.tensor(0.5).exp())


@each_layer
def test_swapping_and_sharing_parameters(name, form):
    if FORMS[form][2] != "parameter" or not LAYERS[name][2]:
        pytest.skip("holds no parameter")
    layer, other = make(name, form), make(name, form)
    for state in LAYERS[name][2].values():
        setattr(other, state, getattr(layer, state))  # tied weights
    nn.Sequential(layer, other)(input()).sum().backward()
    for state in LAYERS[name][2].values():
        assert getattr(layer, state).grad is getattr(other, state).grad
    assert len(list(nn.Sequential(layer, other).parameters())) == len(LAYERS[name][2])
