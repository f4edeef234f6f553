"""What only CUDA has: access patterns, streams, graphs, and calls that must not wait for the device."""

import re

import pytest
import torch
from cases import OPS, data
from forms import each_form, each_place, make_args, tensors


def step(op, args, inplace):
    """Forward and backward; the output and the gradients."""
    output = op(args[0].clone() if inplace else args[0], *args[1:], inplace=inplace)
    return [output, *gradients(output, args)]


def expected(op, args):
    output = op.expected(*args)
    return [output, *gradients(output, args)]


def gradients(output, args):
    return torch.autograd.grad(output.pow(2).sum(), [arg for arg in tensors(args) if arg.requires_grad])


@each_form
@each_place
def test_work_on_a_side_stream_is_ordered(op, kind, inplace, cuda):
    args = make_args(op, kind, torch.float32, cuda, (64, 3, 4096), requires_grad=True)
    target = expected(op, args)
    stream = torch.cuda.Stream()
    source, late = args[0].detach(), torch.zeros_like(args[0], requires_grad=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # whoever does not wait for this stream reads zeros
        with torch.no_grad():
            late.copy_(source)
        actual = step(op, [late, *args[1:]], inplace)
    stream.synchronize()
    torch.testing.assert_close(actual, target)


@each_form
@each_place
def test_graph_capture_and_replay(op, kind, inplace, cuda):
    args = make_args(op, kind, torch.float32, cuda, (8, 3, 1024), requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(op, args, inplace)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step(op, args, inplace)
    for _ in range(2):
        fresh = make_args(op, kind, torch.float32, cuda, (8, 3, 1024), requires_grad=True)
        with torch.no_grad():
            for ours, new in zip(tensors(args), tensors(fresh), strict=True):
                ours.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(static, expected(op, args))


@each_form
@each_place
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_waits_for_the_device(op, kind, inplace, dtype, cuda):
    args = make_args(op, kind, dtype, cuda, requires_grad=True)
    strided = [data((2, 3, 8), dtype, cuda)[..., ::2].requires_grad_(), *args[1:]]
    step(op, args, inplace)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(op, args, inplace)
        step(op, strided, inplace)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_form
def test_the_same_bits_every_time(op, kind, cuda):
    args = make_args(op, kind, torch.float32, cuda, (16, 3, 40_000), requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        first = step(op, args, False)
        for _ in range(3):
            torch.testing.assert_close(step(op, args, False), first, rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(False)


@each_form
def test_a_cpu_number_as_a_tensor(op, kind, cuda):
    if not op.parameters:
        pytest.skip("the op has no parameter")
    x = data((2, 3, 4), torch.float32, cuda).requires_grad_()
    parameters = [torch.tensor(0.5, requires_grad=True) for _ in op.parameters]
    actual = step(op, [x, *parameters], False)
    assert [g.device.type for g in actual] == ["cuda", "cuda", *["cpu" for _ in parameters]]
    torch.testing.assert_close(actual, expected(op, [x, *parameters]))


# csrc/layout.cuh
ACCESS = ["kFlat", "kChannels", "kAcross", "kAcrossWide", "kWhole", "kAlike", "kRows", "kAny", "kTiles"]


def kernels(call):
    """What the call returns, and which of our kernels it ran, with which access."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = call()
        torch.cuda.synchronize()
    found = [re.search(r"cuda::(\w+)_kernel<.*Access\)(\d)", event.key) for event in profile.key_averages()]
    return result, {f"{match[1]} {ACCESS[int(match[2])]}" for match in found if match}


IMAGES = (2, 32, 4, 8)  # its channels and its pixels are whole vectors, of every dtype


def _channels_last(dtype, device):
    return data(IMAGES, dtype, device).contiguous(memory_format=torch.channels_last)


# {name: (input, kind of parameters, are they learnable, kernels)}. Where rows are no whole vectors, the mask is written
# by a second kernel, which goes through the output as one run.
PATTERNS = {
    "one run": (lambda *a: data(IMAGES, *a), "number", False, {"map kFlat"}),
    "one run, odd": (lambda *a: data((1031,), *a), "number", False, {"map kFlat"}),
    "NCHW": (lambda *a: data(IMAGES, *a), "channel", False, {"map kChannels"}),
    "channels_last": (_channels_last, "channel", False, {"map kAcross"}),
    "rows": (lambda *a: data((2, 5, 32), *a)[:, 1:], "number", False, {"map kRows", "map kFlat"}),
    "strided": (lambda *a: data((2, 3, 64), *a)[..., ::2], "number", False, {"map kAny", "map kFlat"}),
    "odd rows": (lambda *a: data((2, 3, 7, 7), *a), "channel", False, {"map kAny", "map kFlat"}),
    "learnable, NCHW": (lambda *a: data(IMAGES, *a), "channel", True, {"map kChannels", "sum kAlike"}),
    "learnable, channels_last": (_channels_last, "channel", True, {"map kAcross", "sum kAlike"}),
    "learnable, (N, C)": (lambda *a: data((40, 64), *a), "channel", True, {"map kAcross", "sum kAlike"}),
    "learnable, odd": (lambda *a: data((5, 3, 7), *a), "channel", True, {"map kAny", "map kFlat", "sum kAny"}),
    "learnable, one": (lambda *a: data(IMAGES, *a), "one", True, {"map kFlat", "sum kAlike"}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_access_pattern(pattern, dtype, cuda):
    make, kind, learnable, wanted = PATTERNS[pattern]
    input = make(dtype, cuda).requires_grad_()
    size = {"channel": input.shape[1:2] or (1,), "one": (1,)}
    parameters = [0.7, -0.3] if kind == "number" else [data(size[kind], dtype, cuda) for _ in range(2)]
    args = [input, *(p.requires_grad_() if learnable else p for p in parameters)]
    op = OPS["scale_add_relu"]
    actual, seen = kernels(lambda: step(op, args, inplace=False))
    assert seen == wanted
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(actual, expected(op, args), rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sums_of_a_slice_beside_a_whole_tensor(dtype, layout, cuda):
    input = data(IMAGES, dtype, cuda).contiguous(memory_format=layout)
    n, c, h, w = IMAGES
    grad = data((n, 2 * c, h, w), dtype, cuda).contiguous(memory_format=layout)[:, c:]
    factor = data((c,), dtype, cuda)
    actual, seen = kernels(lambda: torch.ops.my_cuda_op.scale_backward_factor(grad, input, factor, 1))
    assert seen == {"sum kWhole"}
    expected = (grad.double() * input.double()).sum((0, 2, 3)).to(dtype)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("value_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("factor_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_parameters_wider_than_the_input(factor_dtype, value_dtype, cuda):
    x, factor = _channels_last(torch.bfloat16, cuda), data((IMAGES[1],), factor_dtype, cuda)
    wanted = {(False, False): "kAcross", (True, True): "kAcrossWide"}
    for value in (data((IMAGES[1],), value_dtype, cuda), data((1,), value_dtype, cuda)):
        actual, seen = kernels(lambda value=value: torch.ops.my_cuda_op.scale_add(x, factor, value))
        wide = tuple(parameter.dtype == torch.float32 for parameter in (factor, value))
        assert seen == {f"map {wanted.get(wide, 'kRows')}"}
        torch.testing.assert_close(actual, OPS["scale_add"].expected(x, factor, value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_expanded_gradient_in_rows(dtype, cuda):
    output = data((4, 3, 64), dtype, cuda).relu()
    for grad in (data((1, 1, 1), dtype, cuda), data((4, 3, 1), dtype, cuda), data((1, 3, 64), dtype, cuda)):
        grad = grad.expand(output.shape)
        actual, seen = kernels(lambda grad=grad: torch.ops.my_cuda_op.relu_backward(grad, output))
        assert seen == {"map kRows"}
        torch.testing.assert_close(actual, torch.where(output > 0, grad, 0), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(3, 37, 70), (2, 16, 64), (33, 260), (2, 3, 129, 128)], ids=str)
def test_transposed_operands_in_tiles(shape, dtype, cuda):
    *outer, rows, columns = shape
    transposed = data((*outer, columns, rows), dtype, cuda).mT
    output = data(shape, dtype, cuda).relu()
    actual, seen = kernels(lambda: torch.ops.my_cuda_op.relu_backward(transposed, output))
    assert seen == {"map kTiles"}
    torch.testing.assert_close(actual, torch.where(output > 0, transposed, 0), rtol=0, atol=0)
    factor = data((shape[1],), dtype, cuda)
    for args in ((output, 0.5, -2, transposed), (output, factor, factor, transposed)):
        actual, seen = kernels(lambda args=args: torch.ops.my_cuda_op.scale_add(*args))
        assert seen == {"map kTiles"}
        torch.testing.assert_close(actual, OPS["scale_add"].expected(*args[:3], residual=args[3]))
