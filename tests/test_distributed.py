"""Two processes, with gloo on CPU and NCCL on two GPUs: training loses what one process loses, and DTensors get the
placements that stock PyTorch gives them. By hand: ``python tests/test_distributed.py --device cuda``.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import OPS, data, make_parameters
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import my_cuda_op
from my_cuda_op import nn as mnn

WORLD = 2
LIMIT = 600  # seconds for all checks of a device
COLLECTIVE_LIMIT = 60  # seconds after which a process no longer waits for the other
CHECKS = {}  # what each process runs, given the mesh, by name

# DTensors

SHAPE = (3, 5, 3)  # two processes share no dimension evenly
PLACEMENTS = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "S2": Shard(2), "P": Partial()}
KINDS = {  # of parameters: one of cases.PARAMETERS, and its placement
    "number": ("float", None),
    "0-d R": ("0-d", "R"),
    "(1,) R": ("(1,)", "R"),
    "(1,) S0": ("(1,)", "S0"),
    "per channel R": ("per channel", "R"),
    "per channel S0": ("per channel", "S0"),
}


def place(tensor, placement, mesh):
    if placement == "P":  # each process has another part of the sum
        return DTensor.from_local(tensor * (dist.get_rank() + 1) / 3, mesh, [Partial()], run_check=False)
    return distribute_tensor(tensor, mesh, [PLACEMENTS[placement]])


def run(f, args):
    """The result and the gradients of f."""
    args = [a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in args]
    output = f(*args)
    return [output, *torch.autograd.grad(output.sin().sum(), [a for a in args if isinstance(a, Tensor)])]


def check_dtensor(mesh, op, placement, kind, inplace, compiled=False):
    x = data(SHAPE, torch.float32, mesh.device_type)  # in float64 torch's cache takes a 0-d DTensor for a number
    parameters = make_parameters(op, KINDS[kind][0], x) if kind else ()
    args = [place(x, placement, mesh)]
    args += [place(p, KINDS[kind][1], mesh) if isinstance(p, Tensor) else p for p in parameters]

    def ours(x, *parameters):
        x = x * 1
        output = op(x, *parameters, inplace=inplace)
        assert not inplace or output is x
        return output

    def stock(x, *parameters):
        if kind == "(1,) S0":  # which no view can change to another shape; it broadcasts as it is
            return (op.formula_ if inplace else op.formula)(x * 1, *parameters)
        return op.stock(x * 1, *parameters, inplace=inplace)

    try:
        with CommDebugMode() as communication:
            actual = run(ours, args)
    except RuntimeError as error:  # in place a Partial stays one, and not every torch has a way to it from a shard
        assert inplace and placement == "P" and kind and kind.endswith("S0") and "to P(sum) not" in str(error), error
        return
    torch.testing.assert_close([a.full_tensor() for a in actual], run(op.expected, [x, *parameters]))
    placements = [a.placements for a in actual]
    if compiled:
        for choice in ("decomposition", "kernels"):
            torch.compiler.reset()  # or the functions that are alike count as one that is compiled too often
            with my_cuda_op.compile_with(choice):
                again = run(torch.compile(ours, backend="aot_eager", fullgraph=True), args)
            torch.testing.assert_close([a.to_local() for a in again], [a.to_local() for a in actual])
            assert [a.placements for a in again] == placements
    try:
        with CommDebugMode() as communication_of_stock:
            target = run(stock, args)
    except RuntimeError:  # of a result that is not Partial; ours makes it so
        assert inplace and placement == "P" and placements[0] == args[0].placements
        return
    assert placements[0] == target[0].placements
    if not inplace or placement.startswith("S"):  # else the result is moved to its place, and gradients back
        assert placements == [t.placements for t in target]
        assert communication.get_total_counts() <= communication_of_stock.get_total_counts()


for op, placement, inplace in itertools.product(OPS.values(), PLACEMENTS, [False, True]):
    for kind in KINDS if op.parameters else [None]:
        name = " ".join(filter(None, [op.name + "_" * inplace, placement, kind and f"by {kind}"]))
        case = {"op": op, "placement": placement, "kind": kind, "inplace": inplace}
        CHECKS[name] = partial(check_dtensor, **case)
        if placement == "S1" and kind in (None, "per channel S0"):
            CHECKS[name + " compiled"] = partial(check_dtensor, **case, compiled=True)


# Training


def layers():
    single = mnn.Scale(0.5, num_channels=5), mnn.AddScalar(0.125, num_channels=5), mnn.ReLU(inplace=True)
    return *single, mnn.ScaleAddReLU(1.5, 0.25, num_channels=5)


def convolutional():
    one = mnn.Scale(0.75, learnable=True)  # of shape (1,): sharded, the second process has none of it
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), *layers(), nn.Flatten(), one, nn.Linear(45, 3), mnn.AddScalar(0.25, learnable=True)
    )


def linear():
    return nn.Sequential(nn.Linear(50, 5), *layers(), nn.Linear(5, 3), mnn.Scale(0.75, learnable=True))


def ddp(model, mesh):
    return DistributedDataParallel(model)


def fsdp(model, mesh, **options):
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp_from_meta(model, mesh):
    state = model.state_dict()
    model = fsdp(model.to("meta"), mesh).to_empty(device=mesh.device_type)
    for name, parameter in model.named_parameters():
        layer = model[int(name[0])]
        if type(layer).__module__ == mnn.__name__:
            layer.reset_parameters()
        else:
            parameter.detach().copy_(distribute_tensor(state[name], mesh, parameter.placements))
    return model


def compiled(wrap):
    return lambda model, mesh: torch.compile(wrap(model, mesh), backend="aot_eager")


def shard(name, layer, mesh):
    for name, parameter in layer.named_parameters(recurse=False):
        layer.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))


def tensor_parallel(model, mesh):
    plan = {"0": ColwiseParallel(use_local_output=False), "5": RowwiseParallel(use_local_output=False)}
    parallelize_module(model, mesh, plan)
    distribute_module(model[1:5], mesh, shard)
    return distribute_module(model, mesh)  # what is left: replicated


def in_bfloat16(model):
    """What a mixed-precision policy does, in one process."""
    return lambda x: functional_call(model, {n: p.bfloat16() for n, p in model.named_parameters()}, x.bfloat16())


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model, call, batches):
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), []
    for batch in batches:
        loss = (call(batch) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(loss.detach()).double())
    return torch.stack(losses)


def check_training(mesh, make, wrap, batch="local", dtype=torch.float64, alone=lambda model: model, tolerance=1e-9):
    model = make().to(mesh.device_type, dtype)
    twin = copy.deepcopy(model)
    shape = (6, 2, 5, 5) if make is convolutional else (6, 50)
    batches = [data(shape, dtype, mesh.device_type) for _ in range(5)]
    expected = train(twin, alone(twin), batches)
    assert expected[-1] < 0.9 * expected[0]
    placement = Shard(0) if batch == "local" else PLACEMENTS[batch]
    batches = [distribute_tensor(b, mesh, [placement]) for b in batches]
    if batch == "local":  # each process has its part, and knows of no other
        batches = [b.to_local() for b in batches]
    losses = train(model, wrap(model, mesh), batches)
    if batch == "local":
        dist.all_reduce(losses)
        losses /= WORLD
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    for actual, target in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(actual.detach()), target.detach(), rtol=tolerance, atol=tolerance)


half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
in_half = {"dtype": torch.float32, "alone": in_bfloat16, "tolerance": 2e-2}
for name, make, wrap, options in [
    ("DDP", convolutional, ddp, {}),
    ("DDP compiled", convolutional, compiled(ddp), {}),
    ("FSDP2", convolutional, fsdp, {}),
    ("FSDP2 compiled", convolutional, compiled(fsdp), {}),
    ("FSDP2 not resharded", convolutional, partial(fsdp, reshard_after_forward=False), {}),
    ("FSDP2 in bfloat16", convolutional, partial(fsdp, mp_policy=half), in_half),
    ("FSDP2 from meta", convolutional, fsdp_from_meta, {}),
    ("tensor parallel", linear, tensor_parallel, {"batch": "R"}),
    ("tensor parallel compiled", linear, compiled(tensor_parallel), {"batch": "R"}),
    ("data parallel by DTensor", linear, distribute_module, {"batch": "S0"}),
]:
    CHECKS[name] = partial(check_training, make=make, wrap=wrap, **options)


# Two processes for each device run all checks, since to start them takes longer than a check.


def work(rank, device, folder):
    store = dist.FileStore(f"{folder}/store", WORLD)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend, limit = {"cpu": "gloo", "cuda": "nccl"}[device], timedelta(seconds=COLLECTIVE_LIMIT)
    group = dist.PrefixStore("group", store)
    dist.init_process_group(backend, store=group, rank=rank, world_size=WORLD, timeout=limit)
    mesh = init_device_mesh(device, (WORLD,))
    with open(f"{folder}/{rank}", "w") as log:
        for name, check in CHECKS.items():
            torch.manual_seed(0)
            error = ""
            try:
                check(mesh)
            except Exception:
                error = traceback.format_exc()
            print(json.dumps([name, error]), file=log, flush=True)
            # Where one process failed alone, the other still waits for it: what they would do next does not fit.
            store.set(f"{name} {rank}", str(bool(error)))
            if store.get(f"{name} {1 - rank}") != store.get(f"{name} {rank}"):
                break
    dist.destroy_process_group()


@functools.cache
def outcomes(device) -> dict[str, str]:
    """The error of each check, "" where there was none."""
    errors, end = {name: [] for name in CHECKS}, time.monotonic() + LIMIT
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.spawn(work, (device, folder), nprocs=WORLD, join=False)
        died = ""
        try:  # join returns when a process ends, too
            while not context.join(timeout=max(end - time.monotonic(), 0)) and time.monotonic() < end:
                pass
        except Exception as error:  # of a process that did not get as far as a check, or crashed
            died = f"{error}\n"
        for process in context.processes:
            process.kill()
        for rank in range(WORLD):
            log = Path(folder, str(rank))
            for line in log.read_text().splitlines() if log.exists() else ():
                name, error = json.loads(line)
                errors[name].append(f"process {rank}: {error}" if error else "")
    for e in errors.values():
        if len(e) < WORLD:
            e.append(f"{died}not finished by {WORLD - len(e)} processes")
    return {name: "\n".join(filter(None, e)) for name, e in errors.items()}


@pytest.mark.parametrize("name", CHECKS)
def test_distributed(name, device):
    if device == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs")
    assert not (error := outcomes(device)[name]), error


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    results = outcomes(parser.parse_args().device)
    for name, error in results.items():
        print(f"{name}: {'FAILED ' + error if error else 'passed'}")
    sys.exit(any(results.values()))
