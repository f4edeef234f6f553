"""What a training step of ResNet-50 with frozen normalisation costs, in stock PyTorch and with my_cuda_op.

Fine-tuned detectors freeze normalisation: it is ``x * factor + value`` with fixed numbers for each channel. In stock
PyTorch that, the residual and the ReLU are kernels of their own, and under autocast the float32 factors widen every
activation. Here one call of scale_add_relu does all of it, and scale_add on the way past a block that changes shape.

    python examples/train_resnet50.py --output build/resnet50.json

The model is torchvision's, the images and labels are random numbers. The script compares outputs and losses, and exits
non-zero where the two models part; then it measures time and memory. Beside my_cuda_op it needs torchvision.
"""

import argparse
import atexit
import copy
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

# Compiled code starts from an empty cache, so that the seconds to the first step are those of a first step.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import torch
from report import environment
from torch import Tensor, nn
from torchvision.models import resnet
from torchvision.ops import FrozenBatchNorm2d

from my_cuda_op import nn as mnn

MAX_DIFFERENCE = 1e-4  # relative, in float32; seen are 1e-6
TITLES = {"bfloat16": "bfloat16 autocast", "float32": "float32 (TF32 where the GPU has it)"}


class Bottleneck(resnet.Bottleneck):
    """torchvision's block with layers of ``with_ours``: bn1, bn2 and bn3 end with the ReLU, bn3 adds the residual."""

    def forward(self, x: Tensor) -> Tensor:
        output = self.bn1(self.conv1(x))
        output = self.bn2(self.conv2(output))
        residual = x if self.downsample is None else self.downsample(x)
        return self.bn3(self.conv3(output), residual)


def frozen(layer: type[mnn.ScaleAdd], norm: FrozenBatchNorm2d) -> mnn.ScaleAdd:
    """The layer that computes what the normalisation does. Its numbers are buffers: nothing here learns."""
    factor = norm.weight * (norm.running_var + norm.eps).rsqrt()
    return layer(factor, norm.bias - norm.running_mean * factor)


def with_ours(stock: nn.Module) -> nn.Module:
    """A ResNet-50 of the same weights that computes the same with my_cuda_op."""
    model = resnet.ResNet(Bottleneck, [3, 4, 6, 3], norm_layer=FrozenBatchNorm2d)
    model.load_state_dict(stock.state_dict())
    model.bn1, model.relu = frozen(mnn.ScaleAddReLU, model.bn1), nn.Identity()
    for block in [module for module in model.modules() if isinstance(module, Bottleneck)]:
        block.bn1, block.bn2, block.bn3 = (frozen(mnn.ScaleAddReLU, bn) for bn in (block.bn1, block.bn2, block.bn3))
        del block.relu
        if block.downsample is not None:
            block.downsample[1] = frozen(mnn.ScaleAdd, block.downsample[1])
    return model


@torch.no_grad()
def stock_model() -> nn.Module:
    """torchvision's ResNet-50, with random statistics in place of those that training would leave behind."""
    model = resnet.resnet50(norm_layer=FrozenBatchNorm2d)
    for norm in [module for module in model.modules() if isinstance(module, FrozenBatchNorm2d)]:
        norm.weight.uniform_(0.5, 1.0)
        norm.bias.normal_(0, 0.1)
        norm.running_mean.normal_(0, 0.1)
        norm.running_var.uniform_(0.5, 1.5)
    for block in [module for module in model.modules() if isinstance(module, resnet.Bottleneck)]:
        block.bn3.weight.mul_(0.2)  # or activations would grow from block to block
    return model


class Trainer:
    """A model, its optimizer, and the batch that it sees in each step."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor, dtype: str = "float32", compile: bool = False):
        self.images, self.labels, self.dtype = images, labels, dtype
        model = model.to(images.device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.model = torch.compile(model, dynamic=False) if compile else model

    def step(self) -> Tensor:
        with torch.autocast(self.images.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            loss = nn.functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def batch(n: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    images = torch.randn(n, 3, size, size, device=device).contiguous(memory_format=torch.channels_last)
    return images, torch.randint(1000, (n,), device=device)


def check(stock: nn.Module, device: torch.device) -> None:
    """Exits where the two models give other outputs, or other losses in two steps of SGD."""
    data = batch(2, 64, device)
    pair = [copy.deepcopy(stock).to(device), with_ours(stock).to(device)]
    with torch.no_grad():
        expected, actual = (model(data[0]) for model in pair)
    outputs = ((actual - expected).abs().max() / expected.abs().max()).item()
    trainers = [Trainer(model, *data) for model in pair]
    losses = [[trainer.step().item() for trainer in trainers] for _ in range(2)]
    gaps = [abs(a - e) / abs(e) for e, a in losses]
    print(f"greatest relative difference of the outputs: {outputs:.1e}")
    print("losses of two steps, stock and ours:", ", ".join(f"{e:.6f} {a:.6f}" for e, a in losses))
    if not all(gap <= MAX_DIFFERENCE for gap in (outputs, *gaps)):  # written so that a NaN fails
        sys.exit(
            f"The models must agree to {MAX_DIFFERENCE}, got {outputs:.1e} of the outputs, {max(gaps):.1e} of losses"
        )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def first_step(trainer: Trainer) -> float:
    """Seconds; torch.compile compiles in there."""
    synchronize(trainer.images.device)
    start = time.perf_counter()
    trainer.step()
    synchronize(trainer.images.device)
    return time.perf_counter() - start


def step_ms(trainer: Trainer, ahead: bool) -> float:
    """Milliseconds of a step behind another, as in a training loop: those of the GPU or of the host, whichever is
    slower. With ``ahead`` those of the GPU alone: it is kept busy until the host has launched the step."""
    if trainer.images.device.type != "cuda":
        return first_step(trainer) * 1e3
    if ahead:
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
    else:
        trainer.step()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    trainer.step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def peak_bytes(trainer: Trainer) -> int | None:
    """The most memory that a step needs beside the state: weights, momentum and the batch."""
    if trainer.images.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(stock: nn.Module, data: tuple[Tensor, Tensor], dtype: str, steps: int, compiles: bool) -> list[dict]:
    """A record for each variant. They take turns, so that a slow moment is shared by all."""
    cuda = data[0].is_cuda
    if cuda:
        Trainer(copy.deepcopy(stock), *data, dtype).step()  # cuDNN's search for algorithms is in no one's first step
    trainers = {}
    for compile in [False, True] if compiles else [False]:
        for name, model in (("stock", copy.deepcopy(stock)), ("ours", with_ours(stock))):
            trainers[f"{name}, torch.compile" if compile else name] = Trainer(model, *data, dtype, compile)
    records = {name: {"variant": name, "dtype": dtype} for name in trainers}
    for name, trainer in trainers.items():
        records[name]["first_step_s"] = first_step(trainer)
        for _ in range(3 * cuda):
            trainer.step()
        records[name]["peak_bytes"] = peak_bytes(trainer)
    times: dict[str, list] = {name: [] for name in trainers}
    for _ in range(steps):
        for name, trainer in trainers.items():
            times[name].append([step_ms(trainer, ahead) for ahead in ([False, True] if cuda else [False])])
    for name, record in records.items():
        step, *gpu = (median(each) for each in zip(*times[name], strict=True))
        record |= {"step_ms": step, "gpu_ms": gpu[0] if gpu else None}
    return list(records.values())


def show(records: list[dict]) -> None:
    print(
        f"{'':22}{'step, ms':>10}{'vs stock':>10}{'GPU, ms':>10}{'vs stock':>10}{'peak, MiB':>11}{'first step, s':>15}"
    )
    for record in records:
        cells = f"{record['variant']:22}{record['step_ms']:10.2f}{records[0]['step_ms'] / record['step_ms']:10.2f}"
        if record["gpu_ms"]:
            cells += f"{record['gpu_ms']:10.2f}{records[0]['gpu_ms'] / record['gpu_ms']:10.2f}"
            cells += f"{record['peak_bytes'] / 2**20:11.0f}"
        else:
            cells += f"{'-':>10}{'-':>10}{'-':>11}"
        print(f"{cells}{record['first_step_s']:15.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--steps", type=int, default=10, help="so many are timed of each variant")
    parser.add_argument("--dtype", choices=TITLES, nargs="+", default=list(TITLES))
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("build/resnet50.json"))
    args = parser.parse_args()
    if args.batch < 1 or args.steps < 1 or args.size < 32:
        got = f"{args.batch}, {args.steps} and {args.size}"
        parser.error(f"--batch and --steps must be at least 1 and --size at least 32, got {got}")

    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
    torch.manual_seed(0)
    stock = stock_model()
    torch.backends.cudnn.allow_tf32 = False  # what differs must come from the layers
    check(stock, args.device)
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")

    results = {"environment": environment(args.device.type), "batch": args.batch, "size": args.size, "records": []}
    if not args.no_compile:
        torch.compile(lambda x: x + 1)(torch.zeros(16, device=args.device))  # its start is in no variant's first step
    data = batch(args.batch, args.size, args.device)
    for dtype in args.dtype:
        torch.compiler.reset()
        records = measure(stock, data, dtype, args.steps, not args.no_compile)
        print(f"\n{TITLES[dtype]}, batch of {args.batch} synthetic images of {args.size}x{args.size}, channels_last")
        show(records)
        results["records"] += records
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(results, indent=1) + "\n")  # each dtype takes minutes
    print(f"\n{results['environment']['gpu'] or results['environment']['cpu']}: {args.output}")


if __name__ == "__main__":
    main()
