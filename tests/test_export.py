"""torch.export and AOTInductor: a model leaves Python with our layers in it, for batches of any size."""

import io

import pytest
import torch
from cases import data
from forms import links_by_inductor
from torch import nn

import my_cuda_op
import my_cuda_op.functional as F
from my_cuda_op import nn as mnn

each_way = pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])


class Model(nn.Module):
    """Every layer, with a number, one element and one for each channel; in place, too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 3, 3),
            mnn.Scale(0.5, num_channels=3),
            mnn.AddScalar(num_channels=3, learnable=False),
            mnn.ReLU(),
            mnn.AddScalar(learnable=True),
            mnn.Scale(2.0, inplace=True),
            mnn.ReLU(inplace=True),
        )
        self.norm = nn.BatchNorm2d(3)
        self.fused = nn.ModuleList(
            [mnn.ScaleAddReLU(num_channels=3), mnn.ScaleAdd(0.5, torch.ones(3)), mnn.ScaleAdd(0.5, 2.0, inplace=True)]
        )

    def forward(self, x):
        y = F.scale(self.norm(self.layers(x)), x.mean((0, 2, 3))[:1])
        first, second, third = self.fused
        return third(second(first(y, residual=y), residual=y))


def exported(device, strict):
    torch.compiler.reset()
    model, x = Model().eval().to(device), data((2, 2, 6, 6), torch.float32, device)
    for state in model.state_dict().values():
        if state.is_floating_point():
            state.uniform_(0.1, 1)  # what is 0 or 1 at first would hide a missing layer
    batch = torch.export.Dim("batch", min=1, max=64)
    return model, torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=strict)


def check(run, model, device):
    for batch in (2, 5, 64):
        x = data((batch, 2, 6, 6), torch.float32, device)
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x))


@each_way
def test_saved_and_reloaded(strict, device):
    model, program = exported(device, strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    check(torch.export.load(file).module(), model, device)


@each_way
def test_decompositions(strict, device):
    model, program = exported(device, strict)
    check(program.run_decompositions().module(), model, device)


def test_gradients(device):
    model, program = exported(device, strict=False)
    x, grads = data((5, 2, 6, 6), torch.float32, device), []
    for run in (program.module(), model):
        named = dict(run.named_parameters())
        grads.append(dict(zip(named, torch.autograd.grad(run(x).pow(2).sum(), [*named.values()]), strict=True)))
    torch.testing.assert_close(*grads)
    assert {"layers.1.weight", "layers.4.bias", "fused.0.weight"} <= grads[0].keys()


@each_way
def test_functions(strict, device):
    class Functions(nn.Module):
        def forward(self, x, w):
            y = F.scale(F.add_scalar(F.relu(x), w), 0.5, dim=-1)
            F.add_scalar_(y, -1)
            F.scale_(y, w[:1])
            F.relu_(y)
            F.scale_add_(y, w, 0.25, residual=x)
            F.scale_add_relu_(y, 2.0, w)
            return F.scale_add_relu(y, w[:1], 1.0, residual=F.scale_add(x, w, w))

    args = data((2, 3, 4), torch.float32, device), torch.tensor([0.5, -1.0, 2.0], device=device)
    torch.compiler.reset()
    program = torch.export.export(Functions(), args, strict=strict)
    x, w = args[0], args[1][:, None]
    expected = (((x.relu() + w) * 0.5 - 1) * w[0]).relu()
    expected = ((expected * w + 0.25 + x) * 2 + w).relu()
    expected = (expected * w[0] + 1 + x * w + w).relu()
    torch.testing.assert_close(program.module()(*args), expected)
    torch.testing.assert_close(program.run_decompositions().module()(*args), expected)


@links_by_inductor
def test_aot_inductor(device, tmp_path):
    model, program = exported(device, strict=False)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    check(torch._inductor.aoti_load_package(package), model, device)


@pytest.mark.parametrize("choice", ["decomposition", "kernels"])
def test_any_batch_of_a_learnable_layer_with_a_mask(choice):
    layer = mnn.ScaleAddReLU(num_channels=4)
    with my_cuda_op.compile_with(choice):
        batch = {0: torch.export.Dim("batch")}
        program = torch.export.export(layer, (torch.randn(3, 4, 5),), dynamic_shapes=(batch,))
    assert any("scale_add_relu" in str(node.target) for node in program.graph.nodes) == (choice == "kernels")
    for size in (1, 7, 16):
        x = torch.randn(size, 4, 5)
        torch.testing.assert_close(program.module()(x), layer(x))
