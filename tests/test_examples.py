"""The examples run, and say what they promise to say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]


def train_digits(*args):
    for name in ("sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(name)
    return subprocess.run([sys.executable, EXAMPLES / "train_digits.py", *args], capture_output=True, text=True)


@pytest.mark.parametrize("device", DEVICES)
def test_train_digits_learns_and_agrees_with_stock(device, tmp_path):
    output = tmp_path / "new folder" / "digits.png"
    run = train_digits("--device", device, "--epochs", "8", "--output", output)
    assert run.returncode == 0, run.stdout + run.stderr
    accuracies = re.findall(r"^(?:my_cuda_op|stock) .* (\d+\.\d+)% .* ms$", run.stdout, re.MULTILINE)
    assert len(accuracies) == 2 and min(map(float, accuracies)) >= 97
    assert "largest difference of the losses" in run.stdout
    assert output.read_bytes().startswith(b"\x89PNG")


def test_train_digits_says_when_it_did_not_learn(tmp_path):
    run = train_digits("--device", "cpu", "--epochs", "1", "--output", tmp_path / "digits.png")
    assert run.returncode == 1
    assert "of the held-out digits, below 97%" in run.stderr


@pytest.mark.parametrize("device", DEVICES)
def test_train_resnet50_agrees_with_stock_and_measures(device, tmp_path):
    pytest.importorskip("torchvision")
    output = tmp_path / "new folder" / "resnet50.json"
    few = ["--batch", "2", "--size", "64", "--steps", "1", "--dtype", "float32", "--no-compile"]
    command = [sys.executable, EXAMPLES / "train_resnet50.py", "--device", device, *few, "--output", output]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "greatest relative difference of the outputs" in run.stdout
    losses = re.search(r"losses of two steps, stock and ours: (\S+) (\S+), (\S+) (\S+)$", run.stdout, re.MULTILINE)
    stock, ours, stock_after, ours_after = map(float, losses.groups())
    assert stock == pytest.approx(ours, rel=1e-4) and stock_after == pytest.approx(ours_after, rel=1e-4)
    assert stock_after < stock  # it learns its one batch
    written = json.loads(output.read_text())
    assert {"gpu", "driver", "torch", "commit"} <= written["environment"].keys()
    assert [record["variant"] for record in written["records"]] == ["stock", "ours"]
    for record in written["records"]:
        assert re.search(rf"^{record['variant']} .* {record['first_step_s']:.2f}$", run.stdout, re.MULTILINE)
        assert record["step_ms"] > 0 and (device == "cpu" or min(record["peak_bytes"], record["gpu_ms"]) > 0)
