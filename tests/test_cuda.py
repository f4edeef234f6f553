"""What only CUDA has: streams, graphs, and calls that must not wait for the device."""

import pytest
import torch
from cases import data
from forms import each_form, each_place, make_args, tensors


def step(op, args, inplace):
    """Forward and backward; the output and the gradients."""
    output = op(args[0].clone() if inplace else args[0], *args[1:], inplace=inplace)
    return [output, *torch.autograd.grad(output.pow(2).sum(), tensors(args))]


def expected(op, args):
    output = op.expected(*args)
    return [output, *torch.autograd.grad(output.pow(2).sum(), tensors(args))]


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
