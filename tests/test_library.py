"""Each operator of the dispatcher is complete: schema, kernels, fake, derivatives, twin in my_cuda_op._C."""

import inspect
import re

import pytest
import torch
from cases import OPS, assert_same, data
from forms import tensors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

import my_cuda_op
from my_cuda_op import _C, reference

SHAPE = (2, 3, 4)
NAMES = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("my_cuda_op::"))


def overload(qualified):
    name, _, overload = qualified.removeprefix("my_cuda_op::").partition(".")
    return getattr(getattr(torch.ops.my_cuda_op, name), overload or "default")


OVERLOADS = [overload(name) for name in NAMES]
each_overload = pytest.mark.parametrize("op", OVERLOADS, ids=[str(op).removeprefix("my_cuda_op.") for op in OVERLOADS])


def in_place(op):
    return op._schema.is_mutable


def base_name(op):
    return op._schema.name.removeprefix("my_cuda_op::")


def twin(op):
    return getattr(_C, base_name(op))


def expected(op, *args):
    """The result by the reference; of an operator in place, what its input becomes."""
    return getattr(reference, base_name(op).rstrip("_") if in_place(op) else base_name(op))(*args)


def make_args(op, dtype=torch.float64, device="cpu", requires_grad=False, shape=SHAPE, dim=1):
    """Arguments by what the schema says of them: whole tensors, parameters of one number for each channel, numbers."""
    args = []
    for argument in op._schema.arguments:
        kind, name = str(argument.type), argument.name
        if name == "mask":
            args.append(reference.pack(data(shape, torch.float64)).to(device))
        elif kind in ("Tensor", "Optional[Tensor]"):
            whole = name in ("input", "grad", "result", "residual")
            args.append(data(shape if whole else (shape[dim],), dtype, device).requires_grad_(requires_grad))
        else:
            strides = list(torch.empty(shape).stride())
            args.append({"number": 0.5, "int": dim, "List[int]": strides, "List[bool]": _needs(op)}[kind])
    return args


def _needs(op):
    """All gradients but that by a number."""
    return [True, base_name(op) == "scale_add_backward" and op._overloadname == "Tensor", True, True]


def result(op, args, function=None):
    """What comes out of the operator (or its twin), in place or not."""
    if not in_place(op):
        return (function or op)(*args)
    target = args[0].clone()
    assert (function or op)(target, *args[1:]) is None
    return target


def differentiable_tensor(a):
    return isinstance(a, torch.Tensor) and (a.is_floating_point() or a.is_complex())


def several(outputs):
    """One tensor as a list of one."""
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


# What is registered


def test_every_op_has_a_row_in_cases():
    forward = {base_name(op) for op in OVERLOADS if not base_name(op).endswith("_masked")}
    forward = {name for name in forward if "_backward" not in name}
    assert forward == {*OPS, *[name + "_" for name in OPS]}
    for name, op in OPS.items():
        schemas = [o._schema for o in OVERLOADS if base_name(o) == name]
        assert all(
            [a.name for a in s.arguments if a.name not in ("input", "residual", "dim")] == [*op.parameters]
            for s in schemas
        )


@pytest.mark.parametrize("module", [my_cuda_op, my_cuda_op.functional, reference], ids=lambda m: m.__name__)
def test_every_op_is_a_function_and_has_a_reference(module):
    for name in OPS:
        assert callable(getattr(module, name))
        assert module is reference or callable(getattr(module, name + "_"))


@each_overload
def test_schema_marks_what_is_mutated(op):
    schema = op._schema
    assert in_place(op) == base_name(op).endswith("_")
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == (["input"] if in_place(op) else [])
    several = {"scale_add_relu_masked": ["Tensor", "Tensor"], "scale_add_backward": ["List[Tensor]"]}
    assert [str(r.type) for r in schema.returns] == ([] if in_place(op) else several.get(base_name(op), ["Tensor"]))
    assert all(r.alias_info is None for r in schema.returns)  # a result never aliases an argument


@each_overload
def test_kernels_are_registered(op):
    def has(key):
        return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)

    assert has("CPU")
    assert has("CUDA")  # in every build: without kernels it says how to get them
    assert has("Meta")  # the fake
    assert has("CompositeExplicitAutograd")  # the reference, on every other device
    for device in ("MPS", "XPU", "HPU", "PrivateUse1", "SparseCPU"):
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), device)
    assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "AutogradCPU")


@each_overload
def test_default_arguments_are_those_of_the_reference(op):
    name = base_name(op).rstrip("_") if in_place(op) else base_name(op)
    parameters = inspect.signature(getattr(reference, name)).parameters.values()
    schema = [
        (a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty) for a in op._schema.arguments
    ]
    assert schema == [(p.name, p.default) for p in parameters]


@each_overload
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(op, dtype, device):
    torch.library.opcheck(op, make_args(op, dtype, device, requires_grad=not in_place(op)))
    torch.library.opcheck(op, make_args(op, dtype, device, shape=(3, 0), dim=-1))


# The operators and their twins, called with tensors of every sort


def raw(op):
    return op


each_caller = pytest.mark.parametrize("caller", [raw, twin], ids=["raw", "twin"])


@each_overload
@each_caller
def test_values(op, caller, device):
    args = make_args(op, device=device)
    torch.testing.assert_close(result(op, args, caller(op)), expected(op, *args))


@each_overload
@each_caller
def test_arguments_by_name(op, caller, device):
    args = make_args(op, device=device, dim=0)
    named = {a.name: arg for a, arg in zip(op._schema.arguments, args, strict=True)}
    if in_place(op):
        named["input"] = args[0].clone()
        caller(op)(**named)
        actual = named["input"]
    else:
        actual = caller(op)(**named)
    torch.testing.assert_close(actual, expected(op, *args))


@each_overload
def test_twin_explains_itself(op):
    signatures = re.findall(rf"^(?:\d+\. )?{base_name(op)}\((.*)\) -> .*\n\n(?=.)", twin(op).__doc__, re.MULTILINE)
    names = [argument.name for argument in op._schema.arguments]
    assert names in [re.findall(r"(\w+): ", signature) for signature in signatures]
    assert len(signatures) == len([o for o in OVERLOADS if base_name(o) == base_name(op)])


@each_overload
@each_caller
def test_fake_tensors(op, caller):
    real = make_args(op, torch.bfloat16)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in real]
        outputs = several(result(op, fake, caller(op)))
    for actual, target in zip(outputs, several(expected(op, *real)), strict=True):
        assert isinstance(actual, FakeTensor)
        assert (actual.shape, actual.dtype, actual.stride()) == (target.shape, target.dtype, target.stride())


@each_overload
@each_caller
def test_negative_and_conjugate_views(op, caller, device):
    views = [torch._neg_view, lambda x: x.imag] if "relu" in base_name(op) else [torch._neg_view, torch.conj]
    for view in views:
        dtype = torch.complex128 if view is not torch._neg_view else torch.float64
        args = [view(a) if differentiable_tensor(a) else a for a in make_args(op, dtype, device)]
        plain = [a.clone().resolve_conj().resolve_neg() if isinstance(a, torch.Tensor) else a for a in args]
        torch.testing.assert_close(result(op, args, caller(op)), expected(op, *plain))
        if in_place(op):  # through the view, not around it
            caller(op)(*args)
            torch.testing.assert_close(args[0].resolve_conj().resolve_neg(), expected(op, *plain))


@each_overload
@each_caller
def test_requires_grad(op, caller, device):
    args = make_args(op, device=device, requires_grad=True)
    if in_place(op):
        args[0] = args[0].detach()
        for i in (i for i, a in enumerate(args) if isinstance(a, torch.Tensor)):
            given = [
                a.detach().requires_grad_(i == j) if isinstance(a, torch.Tensor) else a for j, a in enumerate(args)
            ]
            before = given[0].clone()
            with pytest.raises(RuntimeError, match=f"my_cuda_op.functional.{base_name(op)}"):
                caller(op)(*given)
            assert given[0].equal(before)
            with torch.no_grad():
                caller(op)(*given)
            torch.testing.assert_close(given[0], expected(op, before, *given[1:]))
        return

    def run(f):
        output = f(*args)
        loss = sum(o.pow(2).sum() for o in several(output) if o.requires_grad)
        wanted = [a for a in tensors(args) if a.requires_grad]
        return several(output), torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)

    torch.testing.assert_close(run(caller(op)), run(lambda *args: expected(op, *args)))
    with torch.no_grad():
        assert not any(o.requires_grad for o in several(caller(op)(*args)))


def differentiable(op):
    """The positions of arguments whose derivative is not zero throughout: not of those that give a sign or a shape."""

    def constant(name):
        return (
            name in ("result", "mask")
            or (name == "value" and "_backward" in base_name(op))
            or base_name(op).endswith("_backward_" + name)
        )

    arguments = op._schema.arguments
    return [i for i, a in enumerate(arguments) if "Tensor" in str(a.type) and not constant(a.name)]


@each_overload
@each_caller
def test_dual_numbers(op, caller, device):
    for i in differentiable(op):
        args = make_args(op, device=device)

        def run(f, args=args, i=i):
            with forward_ad.dual_level():
                dual = [forward_ad.make_dual(a, a.flip(0)) if i == j else a for j, a in enumerate(args)]
                return [forward_ad.unpack_dual(o) for o in several(f(*dual)) if differentiable_tensor(o)]

        if in_place(op):
            with pytest.raises(RuntimeError, match=f"my_cuda_op.functional.{base_name(op)}"):
                run(caller(op))
        else:
            torch.testing.assert_close(run(caller(op)), run(lambda *args: expected(op, *args)))


@each_overload
@each_caller
def test_function_transforms(op, caller, device):
    args = make_args(op, device=device)
    f = caller(op)

    def call(function):
        if not in_place(op) or function is not f:
            return lambda *args: function(*args)
        return lambda *args: result(op, args, f)

    for i in differentiable(op):

        def transforms(function, i=i):
            function = call(function)
            given = (args[i],)

            def of_one(a):
                outputs = several(function(*args[:i], a, *args[i + 1 :]))
                return torch.cat([o.flatten() for o in outputs if differentiable_tensor(o)])

            yield torch.func.grad(lambda a: of_one(a).pow(2).sum())(*given)
            yield torch.func.jvp(of_one, given, (args[i].flip(0),))
            yield torch.func.hessian(lambda a: of_one(a).pow(2).sum())(*given)
            if not (in_place(op) and i):  # an unbatched input cannot hold a batch
                yield torch.func.vmap(of_one)(torch.stack([args[i], -args[i]]))

        torch.testing.assert_close(list(transforms(f)), list(transforms(lambda *args: expected(op, *args))))


@each_overload
@each_caller
def test_in_place_counts_as_a_change(op, caller, device):
    args = make_args(op, device=device)
    if not in_place(op):
        caller(op)(*args)
        assert all(a._version == 0 for a in tensors(args))
        return
    caller(op)(*args)
    assert args[0]._version >= 1
    other = args[0].clone().requires_grad_()
    total = (other * args[0]).sum()  # which saves args[0]
    caller(op)(*args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


# Devices without kernels


def test_sparse_tensors_run_the_reference():
    x = torch.tensor([[0.0, -2.0], [3.0, 0.0]]).to_sparse()
    torch.testing.assert_close(my_cuda_op.scale(x, 2.0), x * 2.0)
    torch.testing.assert_close(my_cuda_op.relu(x), torch.relu(x))
    torch.testing.assert_close(torch.ops.my_cuda_op.scale(x, 2.0), x * 2.0)


@each_overload
@each_caller
def test_meta_tensors(op, caller):
    args = make_args(op, device="meta")
    outputs = several(result(op, args, caller(op))), several(expected(op, *make_args(op)))
    for actual, target in zip(*outputs, strict=True):
        assert actual.is_meta
        assert (actual.shape, actual.dtype, actual.stride()) == (target.shape, target.dtype, target.stride())


@pytest.mark.parametrize("op", [op for op in OVERLOADS if in_place(op) and len(op._schema.arguments) > 1], ids=str)
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_in_place_refuses_a_result_that_the_input_cannot_hold(op, where):
    args = make_args(op, device=where)
    whole = [i for i, a in enumerate(op._schema.arguments) if a.name in ("input", "residual")]
    args = [a.long() if i in whole else a for i, a in enumerate(args)]
    for call in (op, twin(op)):
        with pytest.raises(RuntimeError, match=r"(Long|int64) can hold"):
            call(*args)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"factor": 2.0}, "factor must be a tensor"),
        ({"input": None}, "input must be given"),
        ({"value": None}, "value must be a tensor"),
        (
            {"mask": lambda device: torch.zeros(1, dtype=torch.uint8, device=device)},
            "mask must be contiguous and have one bit",
        ),
        ({"mask": lambda device: torch.zeros(8, dtype=torch.uint8, device=device)[::2]}, "mask must be contiguous"),
        ({"strides": [12, 4]}, "strides must be those of a dense tensor"),
        ({"strides": [1000, 4, 1]}, "strides must be those of a dense tensor"),
        ({"strides": [-12, 4, 1]}, "strides must be those of a dense tensor"),
        ({"strides": [2**62, 4, 1]}, "strides must be those of a dense tensor"),  # of which the extent overflows
        ({"strides": [0, 0, 0]}, "strides must be those of a dense tensor"),
        ({"strides": [4, 4, 1]}, "strides must be those of a dense tensor"),
    ],
)
def test_backward_reads_nothing_that_it_was_not_given(change, message, device):
    op = torch.ops.my_cuda_op.scale_add_backward
    names = [argument.name for argument in op.default._schema.arguments]
    args = dict(zip(names, make_args(op.Tensor, device=device), strict=True))
    args |= {name: a(device) if callable(a) else a for name, a in change.items()}
    with pytest.raises(RuntimeError, match=message):
        op(**args)


def test_uint16_and_a_complex_number(device):
    x = torch.ones(2, 3, dtype=torch.uint16, device=device)
    for function in (my_cuda_op.scale, reference.scale):
        assert_same(function(x, 1j), x * 1j)
