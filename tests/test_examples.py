"""The examples run, and say what they promise to say."""

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
