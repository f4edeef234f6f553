"""Train one small convolutional network twice, side by side: with my_cuda_op's layers and with stock PyTorch's.

The two start from the same weights and see the same batches of scikit-learn's 1,797 handwritten digits, so their loss
curves must agree to rounding. The script draws both, and exits non-zero when they part or the digits are not learnt.

    python examples/train_digits.py --output digits.png

Beside my_cuda_op it needs scikit-learn, matplotlib and tqdm.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

from my_cuda_op import nn as mnn

MIN_ACCURACY = 0.97
# Both compute the same numbers, but sum the gradients of weight and bias in another order, which costs the last bit or
# two of the loss (2e-7 each). While training is young that is all, now and then 1e-5, and an error of one per cent in a
# single gradient already shows as 1e-4. Sooner or later, though, an activation next to zero falls on the other side of
# the ReLU in one network only; then the two are as far apart as any two runs that differ in a last bit, and that is up
# to a hundredth.
YOUNG, YOUNG_GAP, MAX_GAP = 20, 5e-5, 5e-2


def our_block(channels: int) -> list[nn.Module]:
    return [
        mnn.Scale(num_channels=channels, learnable=True),
        mnn.AddScalar(num_channels=channels, learnable=True),
        mnn.ReLU(),
    ]


class StockAffine(nn.Module):
    """Scale and AddScalar in plain PyTorch."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


def stock_block(channels: int) -> list[nn.Module]:
    return [StockAffine(channels), nn.ReLU()]


def network(block: Callable[[int], list[nn.Module]], seed: int) -> nn.Module:
    torch.manual_seed(seed)  # the blocks start as the identity and draw no random numbers: one seed makes twins
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1, bias=False),
        *block(32),
        nn.Conv2d(32, 64, kernel_size=3, bias=False),
        *block(64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 3 * 3, 10),
    )


class Trainer:
    """A network, its optimizer, and the record of its steps."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.model = model.to(device)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)  # reads more of the held-out digits than plain does
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, x: Tensor, y: Tensor) -> None:
        start = time.perf_counter()
        loss = self.criterion(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())  # item() waits for the GPU, so the clock counts the work and not its launch
        self.seconds.append(time.perf_counter() - start)

    @torch.no_grad()
    def accuracy(self, x: Tensor, y: Tensor) -> float:
        return (self.model(x).argmax(dim=1) == y).float().mean().item()


def load(device: torch.device, seed: int) -> list[Tensor]:
    """The digits as (N, 1, 8, 8) in [0, 1], a quarter of them held out: x_train, x_test, y_train, y_test."""
    digits = load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(digits.target)
    train, test = train_test_split(range(len(y)), test_size=0.25, stratify=y, random_state=seed)
    return [t.to(device) for t in (x[train], x[test], y[train], y[test])]


def plot(path: Path, title: str, ours: list[float], stock: list[float], gaps: list[float]) -> None:
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    curves, distance = figure.subplots(2, sharex=True, height_ratios=[5, 2])
    steps = range(1, len(gaps) + 1)
    curves.plot(steps, stock, color="tab:orange", alpha=0.45, linewidth=5, label="stock PyTorch")
    curves.plot(steps, ours, color="tab:blue", linewidth=1.2, label="my_cuda_op")
    curves.set(title=title, ylabel="training loss")
    distance.plot(steps, [max(gap, 3e-8) for gap in gaps], ".", color="tab:blue", markersize=3)  # a log axis has no 0
    bounds = [YOUNG_GAP if step <= YOUNG else MAX_GAP for step in steps]
    distance.step(steps, bounds, color="tab:red", linestyle="dashed", linewidth=1, label="allowed")
    distance.set(yscale="log", ylim=(1e-8, 1), xlabel="step", ylabel="difference")
    for axes in (curves, distance):
        axes.legend(frameon=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("digits.png"))
    args = parser.parse_args()
    if args.epochs < 1 or args.batch_size < 1:
        parser.error("--epochs and --batch-size must be at least 1")

    # Take cuDNN's own liberties away (TF32, unordered sums), so that what differs comes from the layers.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True

    x_train, x_test, y_train, y_test = load(args.device, args.seed)
    ours = Trainer(network(our_block, args.seed), args.device)
    stock = Trainer(network(stock_block, args.seed), args.device)

    shuffle = torch.Generator().manual_seed(args.seed)
    epochs = [torch.randperm(len(y_train), generator=shuffle).split(args.batch_size) for _ in range(args.epochs)]
    batches = [batch for epoch in epochs for batch in epoch]
    for batch in (bar := tqdm(batches, f"training on {args.device}", unit="step", mininterval=0.5)):
        x, y = x_train[batch], y_train[batch]
        ours.step(x, y)
        stock.step(x, y)
        bar.set_postfix(loss=f"{ours.losses[-1]:.4f}", stock=f"{stock.losses[-1]:.4f}", refresh=False)

    accuracies = [run.accuracy(x_test, y_test) for run in (ours, stock)]
    print(f"{'':12}{'training loss':>14}{'held-out accuracy':>20}{'median step':>14}")
    for name, run, accuracy in zip(("my_cuda_op", "stock"), (ours, stock), accuracies, strict=True):
        print(f"{name:12}{run.losses[-1]:14.4f}{accuracy:20.2%}{median(run.seconds) * 1e3:11.2f} ms")

    gaps = [abs(a - b) for a, b in zip(ours.losses, stock.losses, strict=True)]
    young = gaps[:YOUNG]
    print(f"largest difference of the losses: {max(young):.1e} in the first {len(young)} steps, {max(gaps):.1e} in all")
    scores = f"my_cuda_op {accuracies[0]:.2%}, stock {accuracies[1]:.2%}"
    title = f"Handwritten digits on {args.device}, held-out accuracy: {scores}"
    plot(args.output, title, ours.losses, stock.losses, gaps)
    print(f"curves: {args.output}")

    # Written so that a NaN fails.
    if not (all(gap <= YOUNG_GAP for gap in young) and all(gap <= MAX_GAP for gap in gaps)):
        sys.exit(f"The curves part by more than rounding: allowed are {YOUNG_GAP} at first and {MAX_GAP} later.")
    if not accuracies[0] >= MIN_ACCURACY:
        sys.exit(f"my_cuda_op's network reads {accuracies[0]:.2%} of the held-out digits, below {MIN_ACCURACY:.0%}.")


if __name__ == "__main__":
    main()
