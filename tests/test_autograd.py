"""Derivatives of every order and kind, against numerical ones and against those of the stock expressions."""

import itertools

import pytest
import torch
from cases import data
from forms import SHAPE, call, each_form, each_place, make_args, tensors
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import my_cuda_op

F64, C128 = torch.float64, torch.complex128
# (dtype of the input, dtype of a tensor parameter)
each_dtype = pytest.mark.parametrize(
    "dtypes",
    [(F64, F64), (C128, C128), (F64, C128), (C128, F64)],
    ids=["real", "complex", "real-complex", "complex-real"],
)


def checked_args(op, kind, dtypes, device):
    if not all(op.takes(dtype) for dtype in dtypes) or (dtypes[0] != dtypes[1] and "float" in kind):
        pytest.skip("there is no such call")
    return make_args(op, kind, dtypes[0], device, parameter_dtype=dtypes[1], requires_grad=True)


@each_form
@each_place
@each_dtype
def test_first_derivatives(op, kind, inplace, dtypes, device):
    args = checked_args(op, kind, dtypes, device)
    if inplace and dtypes == (F64, C128):
        pytest.skip("a real tensor cannot hold the result")
    assert gradcheck(
        call(op, inplace),
        args,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
        check_undefined_grad=True,
        check_grad_dtypes=True,
    )


@each_form
@each_place
@each_dtype
def test_second_derivatives(op, kind, inplace, dtypes, device):
    args = checked_args(op, kind, dtypes, device)
    if inplace and dtypes == (F64, C128):
        pytest.skip("a real tensor cannot hold the result")
    assert gradgradcheck(
        call(op, inplace),
        args,
        gen_non_contig_grad_outputs=True,
        check_batched_grad=True,
        check_fwd_over_rev=True,
        check_rev_over_rev=True,
        check_grad_dtypes=True,
    )


def repeated_grads(f, args, times):
    """The gradients of the sum of f(*args)**4, of the sum of their squares, and so on."""
    args, all_grads = [a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args], []
    total = f(*args).pow(4).sum()
    for _ in range(times):
        grads = torch.autograd.grad(total, tensors(args), create_graph=True)
        all_grads.append(grads)
        total = sum(g.pow(2).sum() for g in grads)
    return all_grads


@each_form
@each_place
def test_third_derivatives(op, kind, inplace, device):
    args = make_args(op, kind, device=device)
    torch.testing.assert_close(repeated_grads(call(op, inplace), args, 3), repeated_grads(op.expected, args, 3))


@each_form
@each_place
def test_forward_mode_of_forward_mode(op, kind, inplace, device):
    # PyTorch switches forward mode off while it calls a Function's jvp: one of the two tangents is easily lost
    args = tensors(make_args(op, kind, device=device))
    rest = make_args(op, kind, device=device)[len(args) :]

    def twice(f):
        def square(*a):
            return f(*a, *rest).pow(3)

        tangents = tuple(torch.ones_like(a) for a in args)
        return jvp(lambda *a: jvp(square, a, tangents)[1], tuple(args), tangents)

    torch.testing.assert_close(twice(call(op, inplace)), twice(op.expected))


# torch.func: (f, args) -> anything. f takes tensors only.


def total(f):
    return lambda *args: f(*args).pow(3).sum()


def every(args):
    return tuple(range(len(args)))


def tangents(args):
    return tuple(a.flip(0) for a in args)


def per_sample(transform):
    """transform of each sample of the input; the parameters are shared."""
    return lambda f, args: vmap(lambda x, *p: transform(f, (x[None], *p)), in_dims=(0, *[None] * (len(args) - 1)))(
        *args
    )


TRANSFORMS = {
    "grad": lambda f, args: grad(total(f), every(args))(*args),
    "vjp": lambda f, args: vjp(f, *args)[1](f(*args)),
    "jvp": lambda f, args: jvp(f, args, tangents(args)),
    "jacrev": lambda f, args: jacrev(f, every(args))(*args),
    "jacfwd": lambda f, args: jacfwd(f, every(args))(*args),
    "hessian": lambda f, args: hessian(total(f), every(args))(*args),
    "jacrev of jacrev": lambda f, args: jacrev(jacrev(total(f), every(args)), every(args))(*args),
    "jacrev of jacfwd": lambda f, args: jacrev(jacfwd(total(f), every(args)), every(args))(*args),
    "jacfwd of jacfwd": lambda f, args: jacfwd(jacfwd(total(f), every(args)), every(args))(*args),
    "grad of grad": lambda f, args: grad(lambda *a: sum(g.pow(2).sum() for g in grad(total(f), every(a))(*a)))(*args),
    "jvp of grad": lambda f, args: jvp(grad(total(f), every(args)), args, tangents(args)),
    "grad of jvp": lambda f, args: grad(lambda *a: jvp(f, a, tangents(a))[1].pow(2).sum(), every(args))(*args),
    "vmap of grad": per_sample(lambda f, args: grad(total(f), every(args))(*args)),
    "vmap of jvp": per_sample(lambda f, args: jvp(f, args, tangents(args))),
    "vmap of hessian": per_sample(lambda f, args: hessian(total(f), every(args))(*args)),
    "vmap of vmap": lambda f, args: vmap(lambda *a: vmap(lambda x: f(x[None], *a[1:]))(a[0]))(
        *[torch.stack([a, -a]) for a in args]
    ),
    "grad of vmap": lambda f, args: grad(lambda *a: per_sample(lambda f, b: total(f)(*b))(f, a).sum(), every(args))(
        *args
    ),
    "vmap in chunks": lambda f, args: vmap(lambda x: f(x[None], *args[1:]), chunk_size=1)(args[0]),
}


@each_form
@each_place
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_function_transforms(op, kind, inplace, transform, device):
    args = make_args(op, kind, device=device)
    given, numbers = tuple(tensors(args)), [a for a in args if not isinstance(a, torch.Tensor)]

    def run(f):
        return TRANSFORMS[transform](lambda *a: f(*a, *numbers), given)

    torch.testing.assert_close(run(call(op, inplace)), run(op.expected))


def slices(x, in_dim, size):
    return [x] * size if in_dim is None else x.unbind(in_dim)


@each_form
@each_place
def test_vmap_over_any_dimensions(op, kind, inplace, device):
    size, checked = 5, 0
    sample = make_args(op, kind, device=device)
    choices = [
        [None, 0, 1, -1] if a is sample[0] else [None, 0, -1] if isinstance(a, torch.Tensor) else [None] for a in sample
    ]
    for in_dims in itertools.product(*choices):
        if all(d is None for d in in_dims) or (inplace and in_dims[0] is None):
            continue  # nothing to do; or an unbatched tensor would have to hold a batch
        args = [
            a if d is None else data((size, *a.shape), a.dtype, device).movedim(0, d)
            for a, d in zip(sample, in_dims, strict=True)
        ]
        expected = torch.stack(
            [op.expected(*each) for each in zip(*map(slices, args, in_dims, [size] * 9), strict=True)]
        )
        torch.testing.assert_close(vmap(call(op, inplace), in_dims)(*args), expected)
        torch.testing.assert_close(vmap(op, in_dims, out_dims=-1)(*args), expected.movedim(0, -1))
        checked += 1
    assert checked >= 3 - inplace


@each_form
def test_vmap_in_place_writes_through(op, kind, device):
    args = make_args(op, kind, device=device)
    x, expected = args[0].clone(), op.expected(*args)
    vmap(lambda x: op(x[None], *args[1:], inplace=True))(x)
    torch.testing.assert_close(x, expected)


@each_form
def test_vmap_in_place_refuses_what_an_unbatched_tensor_cannot_hold(op, kind, device):
    x, *parameters = make_args(op, kind, device=device)
    if not tensors(parameters):
        pytest.skip("there is nothing else to batch")
    before = x.clone()
    with pytest.raises(RuntimeError, match="vmap"):
        vmap(lambda *p: op(x, *p, inplace=True))(*[torch.stack([p, p]) for p in parameters])
    assert x.equal(before)


@each_form
def test_per_sample_gradients_of_a_layer(op, kind, device):
    # the field's way to do it: functional_call under vmap of grad
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.before = torch.nn.Linear(SHAPE[-1], SHAPE[-1], dtype=F64, device=device)
            _, *parameters = make_args(op, kind, device=device)
            self.parameters_of_op = torch.nn.ParameterList(p for p in tensors(parameters))
            self.numbers = [p for p in parameters if not isinstance(p, torch.Tensor)]

        def forward(self, x):
            return self.f(self.before(x), *self.parameters_of_op, *self.numbers)

    layer, x = Layer(), data((5, *SHAPE), F64, device)

    def run(f):
        layer.f = f
        weights = dict(layer.named_parameters())
        return vmap(grad(lambda w, x: functional_call(layer, w, (x,)).pow(2).sum()), (None, 0))(weights, x)

    torch.testing.assert_close(run(op), run(op.expected))


# Ordinary autograd, beyond what gradcheck looks at


@each_form
@each_place
@pytest.mark.parametrize("only", [0, 1])
def test_dual_numbers_beside_requires_grad(op, kind, inplace, only, device):
    args = make_args(op, kind, device=device, requires_grad=True)
    if len(tensors(args)) <= only:
        pytest.skip("the op has no such tensor")
    tangent = torch.ones_like(args[only])

    def run(f):
        with forward_ad.dual_level():
            dual = [forward_ad.make_dual(a, tangent) if i == only else a for i, a in enumerate(args)]
            primal, result_tangent = forward_ad.unpack_dual(f(*dual))
            total = primal.pow(2).sum() + result_tangent.pow(2).sum()
            return primal, result_tangent, torch.autograd.grad(total, tensors(args))

    torch.testing.assert_close(run(call(op, inplace)), run(op.expected))


@each_form
@each_place
def test_a_change_of_what_was_saved_is_an_error(op, kind, inplace, device):
    args = make_args(op, kind, device=device, requires_grad=True)
    x, target = args[0].clone(), torch.autograd.grad(op.expected(*args).sum(), tensors(args))
    output = op(x, *args[1:], inplace=inplace)
    with torch.no_grad():
        for changed in {output, x}:
            my_cuda_op.scale_(changed, -1.0)
    try:
        output.sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        assert not (inplace and op.parameters)  # what these need is the input as it was
    else:
        torch.testing.assert_close(tuple(a.grad for a in tensors(args)), target)


@each_form
def test_backward_twice(op, kind, device):
    args = make_args(op, kind, device=device, requires_grad=True)
    total = op(*args).pow(2).sum()
    once = torch.autograd.grad(total, tensors(args), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(total, tensors(args)), once)
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


@each_form
@each_place
def test_grad_fn_is_named_after_the_op(op, kind, inplace, device):
    args = make_args(op, kind, device=device, requires_grad=True)
    args[0] = args[0].clone()
    name = op(*args, inplace=inplace).grad_fn.name().lower()
    if not (inplace and (len(tensors(args)) > 1 or op.rounds_once)):  # which copies
        assert op.name.replace("_", "") in name


@each_form
def test_in_place_on_a_view_changes_the_history_of_its_base(op, kind, device):
    args = make_args(op, kind, device=device, requires_grad=True)

    def run(f):
        base = args[0].repeat(2, 1, 1)
        f(base[2:], *args[1:], inplace=True)
        return base, torch.autograd.grad(base.pow(2).sum(), tensors(args))

    torch.testing.assert_close(run(op), run(op.stock))
