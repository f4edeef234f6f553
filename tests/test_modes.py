"""The modes and wrappers of PyTorch: each sees our operators, and gets from them what it gets from stock ones."""

import threading
from functools import partial

import pytest
import torch
from cases import OPS, data
from forms import call, each_form, each_place, make_args, tensors
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import my_cuda_op
from my_cuda_op import nn as mnn


def grads(f, args):
    return torch.autograd.grad(f(*args).float().pow(2).sum(), tensors(args))


# Autocast


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_the_dtypes_of_stock(op, kind, dtype, device):
    args = make_args(op, kind, torch.float32, device, requires_grad=True)
    with torch.autocast(device, dtype):
        low = torch.mm(args[0].flatten(1), args[0].flatten(1).mT)[:, :1].expand(2, 3)  # a bfloat16 activation
        for x in (args[0], low):
            output = op(x, *args[1:])
            assert (
                output.dtype == x.dtype
            )  # which stock keeps, too, beside a number; beside our float32 parameters we do
        assert op(args[0], *args[1:]).dtype == op.stock(*args).dtype
    torch.testing.assert_close(grads(op, args), grads(op.expected, args))


def layers(device):
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), mnn.Scale(0.5, num_channels=3), mnn.AddScalar(num_channels=3), mnn.ReLU(inplace=True)
    ).to(device)


def test_autocast_training_step(device):
    model, x = layers(device), data((2, 2, 6, 6), torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        output = model(x)
        assert output.dtype == torch.bfloat16  # float32 parameters do not widen it
    output.float().pow(2).mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_grad_scaler(cuda, dtype):
    model, x = layers(cuda), data((2, 2, 6, 6), torch.float32, cuda)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler(cuda)
    before, losses = [p.detach().clone() for p in model.parameters()], []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast(cuda, dtype):
            loss = model(x).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(not a.equal(b) for a, b in zip(before, model.parameters(), strict=True))


# Without derivatives


@each_form
@each_place
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad(op, kind, inplace, mode, device):
    args = make_args(op, kind, device=device, requires_grad=True)
    with mode():
        output = call(op, inplace)(*args)
        assert not output.requires_grad
        assert output.is_inference() == (mode is torch.inference_mode)
        torch.testing.assert_close(output, op.expected(*args))


@each_form
@each_place
def test_enable_grad_in_inference_mode_records_nothing(op, kind, inplace, device):
    args = make_args(op, kind, device=device, requires_grad=True)
    with torch.inference_mode(), torch.enable_grad():  # as an activation checkpoint in there does
        output = op(args[0].detach().clone() if inplace else args[0], *args[1:], inplace=inplace)
        assert output.grad_fn is None and not output.requires_grad
        torch.testing.assert_close(output, op.expected(*args))


@each_form
def test_an_inference_tensor_cannot_be_changed_or_saved_outside(op, kind, device):
    with torch.inference_mode():
        inside = make_args(op, kind, device=device)
        before = inside[0].clone()
    torch.testing.assert_close(op(*inside), op.expected(*inside))  # reading is fine
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        op(*inside, inplace=True)
    assert inside[0].equal(before)


# Tensors that are not what they seem


@each_form
@each_place
def test_fake_and_meta_tensors(op, kind, inplace):
    args = make_args(op, kind, torch.bfloat16, requires_grad=True)
    target = op.expected(*args)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        output = call(op, inplace)(*fake)
        assert isinstance(output, FakeTensor)
        fake_grads = grads(call(op, inplace), fake)
        assert op(torch.ones(2, 3), *fake[1:]).shape == (2, 3)
    meta = [a.detach().to("meta").requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    for x, dx in ((output, fake_grads), (call(op, inplace)(*meta), grads(call(op, inplace), meta))):
        assert (x.shape, x.dtype, x.stride()) == (target.shape, target.dtype, target.stride())
        assert [(g.shape, g.dtype) for g in dx] == [(a.shape, a.dtype) for a in tensors(args)]


class Logged(torch.Tensor):
    """A subclass through __torch_function__, of which there are many."""

    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@each_form
@each_place
def test_torch_function_subclass(op, kind, inplace, device):
    args = make_args(op, kind, device=device)
    function = getattr(my_cuda_op.functional, op.name)
    for i in range(len(tensors(args))):
        given = [a.clone().as_subclass(Logged) if i == j else a for j, a in enumerate(args)]
        given[0] = given[0] if i == 0 else given[0].clone()
        Logged.seen.clear()
        output = op(*given, inplace=inplace)
        assert function in Logged.seen  # the public function, which an override recognises
        assert type(output) is Logged
        torch.testing.assert_close(output.as_subclass(torch.Tensor), op.expected(*args))


@each_form
def test_torch_function_mode(op, kind, device):
    class Log(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    args, seen = make_args(op, kind, device=device), []
    with Log():
        op(*args)
    assert getattr(my_cuda_op.functional, op.name) in seen


@each_form
def test_jit_trace(op, kind, device):
    args = make_args(op, kind, torch.float32, device, requires_grad=True)
    traced = torch.jit.trace(lambda *tensors: op(*tensors, *args[len(tensors) :]), tuple(tensors(args)))
    assert "PythonOp" not in str(traced.graph) and "^" not in str(traced.graph)  # as which a Function is recorded
    fresh = make_args(op, kind, torch.float32, device, (4, 3, 5), requires_grad=True)
    actual, target = traced(*tensors(fresh)), op.expected(*fresh[: len(tensors(fresh))], *args[len(tensors(fresh)) :])
    torch.testing.assert_close(actual, target)
    gradients = [torch.autograd.grad(output.pow(2).sum(), tensors(fresh)) for output in (actual, target)]
    torch.testing.assert_close(*gradients)


@each_form
@each_place
def test_torch_dispatch_mode_sees_our_ops(op, kind, inplace, device):
    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func).removeprefix("my_cuda_op.").partition(".")[0])
            return func(*args, **(kwargs or {}))

    args, seen = make_args(op, kind, device=device), []
    name = op.name + "_" if inplace else op.name
    with Log():
        op(*args, inplace=inplace)
    assert seen == [name]
    args, seen = make_args(op, kind, device=device, requires_grad=True), []
    with Log():
        op(*args).sum().backward()
    assert op.recorded in seen
    if not (op.name == "add_scalar" and kind == "float"):  # whose gradient is the incoming one
        after = seen[seen.index(op.recorded) + 1 :]
        assert any(hasattr(torch.ops.my_cuda_op, name) for name in after)


@each_form
def test_flop_counter_and_profiler(op, kind, device):
    args = make_args(op, kind, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        torch.mm(op(*args).flatten(1), torch.ones(6, 5, dtype=args[0].dtype, device=device)).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 2 * 6 * 5  # the product's and its derivative's; ours count for nothing
    with torch.profiler.profile() as profile:
        op(*args).sum().backward()
    names = {event.name for event in profile.events()}
    assert f"my_cuda_op::{op.recorded}" in names
    assert any(name.endswith("Backward") and op.name.replace("_", "") in name.lower() for name in names)


# What is saved for backward


@each_form
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoint(op, kind, use_reentrant, device):
    args = make_args(op, kind, device=device, requires_grad=True)

    def block(*args):
        return op(args[0] * 2, *args[1:])

    checkpoint(block, *args, use_reentrant=use_reentrant).pow(2).sum().backward()
    target = grads(lambda x, *p: op.expected(x * 2, *p), args)
    torch.testing.assert_close(tuple(a.grad for a in tensors(args)), target)


@each_form
def test_selective_checkpoint(op, kind, device):
    args = make_args(op, kind, device=device, requires_grad=True)

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls = getattr(self, "calls", 0) + (func.name().partition(".")[0] == f"my_cuda_op::{op.recorded}")
            return func(*args, **(kwargs or {}))

    def calls(policy):
        def choose(context, func, *args, **kwargs):
            return policy if func.namespace == "my_cuda_op" else CheckpointPolicy.PREFER_RECOMPUTE

        def f(*args):
            return checkpoint(lambda *a: op(*a).sin().sin(), *args, use_reentrant=False, context_fn=contexts)

        contexts = partial(create_selective_checkpoint_contexts, choose)
        with Count() as count:
            torch.testing.assert_close(grads(f, args), grads(lambda *a: op.expected(*a).sin().sin(), args))
        return count.calls

    assert calls(CheckpointPolicy.PREFER_RECOMPUTE) == calls(CheckpointPolicy.MUST_SAVE) + 1


@each_form
@each_place
def test_saved_tensors_hooks_see_each_tensor_once(op, kind, inplace, device):
    args = make_args(op, kind, device=device, requires_grad=True)
    args[0] = args[0].clone()
    packed, unpacked = [], []
    pack, unpack = lambda t: packed.append(t) or t.clone(), lambda t: unpacked.append(t) or t
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = op(*args, inplace=inplace)
    assert len({t.data_ptr() for t in packed}) == len(packed) <= len(tensors(args)) + (not op.parameters)
    output.sum().backward()
    assert len(unpacked) == len(packed)


@each_form
def test_anomaly_mode(op, kind, device):
    args = make_args(op, kind, device=device, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        torch.testing.assert_close(grads(op, args), grads(op.expected, args))
        with (
            pytest.raises(RuntimeError, match=r"returned nan values"),
            pytest.warns(UserWarning, match="Traceback of forward"),
        ):
            op(*args).backward(torch.full_like(args[0], float("nan")))


@each_form
@each_place
def test_threads(op, kind, inplace, device):
    args = make_args(op, kind, shape=(2, 3, 1000), device=device, requires_grad=True)
    target, results = grads(op.expected, args), []
    f = call(op, inplace)

    def work():
        for _ in range(10):
            results.append(grads(f, args))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 40
    for result in results:
        torch.testing.assert_close(result, target)


# Processes


class Computed(torch.utils.data.Dataset):
    """What a worker of a DataLoader may do with its samples."""

    def __init__(self, op, args):
        self.op, self.x, self.parameters = op, args[0], args[1:]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.op(self.x[i : i + 1], *self.parameters)[0]


@each_form
def test_data_loader_with_workers(op, kind):
    args = make_args(op, kind, shape=(6, 3, 1000))
    op(*args)  # a fork takes what the parent has done so far along
    loader = torch.utils.data.DataLoader(Computed(op, args), batch_size=2, num_workers=2)
    torch.testing.assert_close(torch.cat([*loader]), op.expected(*args))


def train_a_copy(rank, layer, x, shared_grads):
    output = mnn.ReLU()(layer(x)) * (rank + 1)
    (grad,) = torch.autograd.grad(output.sum(), layer.weight)
    with torch.no_grad():
        my_cuda_op.add_scalar_(shared_grads[rank], grad, dim=0)


def test_multiprocessing_with_shared_memory(device):
    layer, x = mnn.Scale(0.5, num_channels=3).to(device).share_memory(), data((2, 3, 4), torch.float32, device)
    shared_grads = torch.zeros(2, 3, device=device).share_memory_()
    torch.multiprocessing.spawn(train_a_copy, (layer, x, shared_grads), nprocs=2)
    target = x.relu().sum((0, 2))
    torch.testing.assert_close(shared_grads, torch.stack([target, 2 * target]))


def test_a_mode_that_is_left_is_forgotten():
    x = torch.ones(2, 3)
    for context in (torch.no_grad(), torch.inference_mode(), FakeTensorMode(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            pass
        for op in OPS.values():
            output = op(x, *[2.0 for _ in op.parameters])
            assert type(output) is torch.Tensor and output.dtype == x.dtype and not output.is_inference()
