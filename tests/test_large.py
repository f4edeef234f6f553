"""What shows at size only: more than 2^31 elements, a second GPU, and kernels that use every thread of the CPU."""

import os
import time
from pathlib import Path

import pytest
import torch
from cases import OPS, assert_same, data
from test_backward import gradients

from my_cuda_op import _C

SCALE, ADD, RELU = OPS["scale"], OPS["add_scalar"], OPS["relu"]
HUGE = (
    2**31 + 2**20 + 5
)  # the offset of its last element does not fit into 32 bits, signed, even in elements of one byte
CHUNK = 2**28


def check_in_chunks(output, input, formula):
    """Every element, without a second large tensor."""
    assert output.shape == input.shape
    for start in range(0, input.size(0), CHUNK):
        expected = formula(input[start : start + CHUNK])
        assert torch.equal(output[start : start + CHUNK], expected), f"wrong from element {start} on"


def pattern(shape, dtype, device):
    """-100 to 100, again and again, with a period that is prime to powers of 2: an element from elsewhere shows."""
    numel = torch.Size(shape).numel()
    period = (torch.arange(201, device=device) - 100).to(dtype)
    return period.repeat(numel // 201 + 1)[:numel].view(shape)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=str)
def test_forward_of_more_than_2_31_elements(dtype, needs_memory, cuda):
    needs_memory(16)
    input = pattern((HUGE,), dtype, cuda)
    check_in_chunks(SCALE(input, 2), input, lambda x: x * 2)
    check_in_chunks(RELU(input), input, torch.relu)
    check_in_chunks(ADD(input[1:], 3), input[1:], lambda x: x + 3)  # misaligned
    assert SCALE(input[:-1], 2, inplace=True)._version
    check_in_chunks(input[-CHUNK:-1], pattern((HUGE,), dtype, cuda)[-CHUNK:-1], lambda x: x * 2)


def test_strided_layouts_of_more_than_2_31_elements(needs_memory, cuda):
    """The work is split there: offsets do not fit into 32 bits. Rows tell where they come from."""
    needs_memory(24)
    rows, columns = 2**16 + 3, 2**15 + 40
    input = pattern((rows, columns), torch.int8, cuda)
    for view in (
        lambda x: x[:, 1:],
        lambda x: x[:, 3:-4],
        lambda x: x.t(),
        lambda x: x.view(-1)[1:-1].view(2, -1)[:, 5:].t(),
    ):
        part = view(input)
        assert part.numel() > 2**31
        for op, given in (
            (SCALE, 2),
            (RELU, None),
            (ADD, torch.arange(part.size(1), device=cuda).remainder(7).to(torch.int8)),
        ):
            parameters = () if given is None else (given,)
            output = op(part, *parameters)
            step = CHUNK // part.size(1) + 1
            for start in range(0, part.size(0), step):
                assert torch.equal(output[start : start + step], op.stock(part[start : start + step], *parameters))
            del output


def test_backward_of_more_than_2_31_elements(needs_memory, cuda):
    needs_memory(40)
    input = pattern((HUGE,), torch.bfloat16, cuda)
    grad = torch.ones((), dtype=torch.bfloat16, device=cuda).expand(HUGE)
    (got,) = gradients(RELU, [input], grad)
    check_in_chunks(got, input, lambda x: (x > 0).to(x.dtype))
    (got,) = gradients(lambda x: SCALE(x, 2.0), [input], input)
    check_in_chunks(got, input, lambda x: x * 2)


@pytest.mark.parametrize("shape", [(HUGE,), (2**16 + 1, 2**15 + 3), (3, 2**15 + 3, 2**15)], ids=str)
def test_sums_of_more_than_2_31_elements(shape, needs_memory, cuda):
    """Sums of small integers, for which no order of float32 additions rounds much: each channel has its own."""
    needs_memory(24)
    channels = shape[1] if len(shape) > 1 else 1
    grad = torch.ones(shape, dtype=torch.bfloat16, device=cuda)
    weights = (torch.arange(channels, device=cuda) % 5 + 1).to(torch.bfloat16)
    if len(shape) > 1:
        grad *= weights.view(-1, *[1] * (len(shape) - 2))
    parameter = torch.ones(channels, device=cuda, requires_grad=True)
    exact = weights.double() * (grad.numel() // channels)
    for take, factor in ((ADD, 1), (SCALE, weights.double())):
        (got,) = torch.autograd.grad(take(grad, parameter), parameter, grad)
        torch.testing.assert_close(got.double(), exact * factor, rtol=1e-4, atol=0)
    if len(shape) == 2:  # the channels along the other dimension
        parameter = torch.ones(shape[0], device=cuda, requires_grad=True)
        (got,) = torch.autograd.grad(ADD(grad, parameter, dim=0), parameter, grad)
        torch.testing.assert_close(got.double(), weights.double().sum().expand(shape[0]), rtol=1e-4, atol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_second_gpu_while_the_first_is_current(op):
    with torch.cuda.device(0):
        for dtype in (torch.float32, torch.bfloat16):
            input = data((64, 33, 5), dtype, "cuda:1")
            given = [data((33,), torch.float32, "cuda:1") for _ in op.parameters]
            grad = data((5, 33, 64), dtype, "cuda:1").permute(2, 1, 0)
            assert_same(op(input, *given), op.expected(input, *given), signed_zero=False)
            ours, stock = (gradients(f, [input, *given], grad) for f in (op, op.expected))
            for got, expected in zip(ours, stock, strict=True):
                assert got.device == torch.device("cuda:1")
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            expected = op.expected(input, *given)
            assert_same(op(input, *given, inplace=True), expected, signed_zero=False)
        assert torch.cuda.current_device() == 0
    with pytest.raises(RuntimeError, match=r"device of input, cuda:1, got cuda:0"):
        SCALE(data((4, 3), torch.float32, "cuda:1"), data((3,), torch.float32, "cuda:0"))


# CPU threads


def cpu_time_of_threads():
    """Nanoseconds that each thread of this process has run."""
    times = {}
    for task in Path("/proc/self/task").iterdir():
        times[task.name] = int((task / "schedstat").read_text().split()[0])
    return times


def shares(call, seconds=0.3):
    """Which part of the work each thread does, from the largest to the smallest."""
    before, end = cpu_time_of_threads(), time.monotonic() + seconds
    while time.monotonic() < end:
        call()
    spent = sorted((t - before.get(name, 0) for name, t in cpu_time_of_threads().items()), reverse=True)
    return [t / sum(spent) for t in spent]


N = (64, 64, 1024)
KERNELS = {
    "scale": lambda x, w: _C.scale(x, 2.0),
    "scale of bfloat16": lambda x, w: _C.scale(x.view(torch.bfloat16), 2.0),
    "scale per channel": lambda x, w: _C.scale(x, w, 1),
    "scale per last channel": lambda x, w: _C.scale(x.transpose(1, 2), w, 2),
    "add_scalar of a slice": lambda x, w: _C.add_scalar(x[:, :, 1:], 2.0),
    "relu": lambda x, w: _C.relu(x),
    "relu of every second": lambda x, w: _C.relu(x[..., ::2]),
    "relu in place": lambda x, w: _C.relu_(x),
    "relu_backward": lambda x, w: _C.relu_backward(x, x),
    "gradient of a factor": lambda x, w: _C.scale_backward_factor(x, x, w[:1], 1),
    "gradient of factors": lambda x, w: _C.scale_backward_factor(x, x, w, 1),
    "gradient of values": lambda x, w: _C.add_scalar_backward_value(x.transpose(1, 2), w, 2),
}


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="reads Linux's account of each thread")
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_use_more_than_one_thread(kernel):
    x, w, threads = torch.randn(N), torch.randn(64), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        KERNELS[kernel](x, w)
        second = shares(lambda: KERNELS[kernel](x, w))[1]
        torch.set_num_threads(1)
        KERNELS[kernel](x, w)
        time.sleep(0.05)  # until the second thread has given up waiting for work
        second_of_one = shares(lambda: KERNELS[kernel](x, w), seconds=0.1)[1]
    finally:
        torch.set_num_threads(threads)
    assert second > 0.2, f"the second of two threads did {second:.0%} of the work"
    assert second_of_one < 0.1, "this test cannot tell: a second thread ran although one was asked for"
