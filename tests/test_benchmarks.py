"""The benchmarks run, write what README.md promises, and notice what became slower. How fast anything is, they say."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RUN = Path(__file__).resolve().parents[1] / "benchmarks" / "run.py"
FEW = (
    r"^relu (forward|backward) float32 contiguous 1024$|^scale_add_relu, learnable step .* channels_last"
    r"|float32 parameters step|^add_scalar host"
)
IMAGE = 2 * 64 * 56 * 56


def benchmark(*args, **env):
    command = [sys.executable, RUN, "--device", "cpu", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The folder that a run of a few rows fills."""
    folder = tmp_path_factory.mktemp("benchmarks") / "new folder"
    run = benchmark("--only", FEW, "--output", folder, GIT_COMMIT="0123abc")
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture
def scripts(monkeypatch):
    """Makes the modules of benchmarks/ importable."""
    monkeypatch.syspath_prepend(RUN.parent)


@pytest.fixture
def report(scripts):
    return importlib.import_module("report")


def test_results_say_what_was_measured_and_where(results):
    written = json.loads((results / "results.json").read_text())
    fields = {"date", "device", "cpu", "gpu", "driver", "torch", "cuda", "my_cuda_op", "build", "commit"}
    assert fields <= written["environment"].keys()
    assert written["environment"]["commit"] == "0123abc"
    by_id = {record["id"]: record for record in written["records"]}
    relu, learnable = (
        "relu {} float32 contiguous 1024",
        "scale_add_relu, learnable step float32 channels_last 2x64x56x56",
    )
    autocast = "scale_add_relu, residual, float32 parameters step bfloat16 channels_last 2x64x56x56"
    hosts = {"add_scalar host forward cpu", "add_scalar host step cpu"}
    assert by_id.keys() == {relu.format("forward"), relu.format("backward"), learnable, autocast} | hosts
    for name, record in by_id.items():
        assert min(record["us"].values()) > 0 and {"ours", "eager"} <= record["us"].keys()
        assert "ceiling" in record["us"] or name in hosts
    assert by_id[relu.format("forward")]["bytes"] == 2 * 1024 * 4
    assert by_id[relu.format("backward")]["saved_bytes"]["eager"] == 1024 * 4
    # Forward: input, parameters, output, bits; backward: gradient, input, bits, gradient of the input.
    assert by_id[learnable]["bytes"] == 5 * IMAGE * 4 + 2 * IMAGE // 8 + 2 * 64 * 4
    assert by_id[learnable]["saved_bytes"]["ours"] == IMAGE * 4 + IMAGE // 8 + 64 * 4
    # Forward: input, residual, parameters, output, bits; backward: gradient, bits, gradients of input and residual.
    assert by_id[autocast]["bytes"] == 6 * IMAGE * 2 + 2 * IMAGE // 8 + 2 * 64 * 4
    assert by_id[autocast]["saved_bytes"] == {"ours": IMAGE // 8 + 64 * 4, "eager": IMAGE * 4 + 64 * 4}


def test_results_can_be_read_and_seen(results):
    text = (results / "results.md").read_text()
    for record in json.loads((results / "results.json").read_text())["records"]:
        assert f"| `{record['id']}` |" in text
    pytest.importorskip("matplotlib")
    plots = {path.stem: path.read_bytes() for path in results.glob("*.png")}
    assert plots.keys() == {"bandwidth-relu", "fused", "host", "saved"}
    assert all(plot.startswith(b"\x89PNG") for plot in plots.values())


def test_compare_fails_where_a_row_became_slower(results, tmp_path):
    """Beside results in which add_scalar was a hundred times as fast forward, and a hundred times as slow both ways."""
    doctored = json.loads((results / "results.json").read_text())
    for record in doctored["records"]:
        record["us"]["ours"] *= 0.01 if record["direction"] == "forward" else 100
    before = tmp_path / "before.json"
    before.write_text(json.dumps(doctored))
    run = benchmark("--only", "^add_scalar host", "--output", tmp_path, "--compare", before, "--threshold", "0.5")
    assert run.returncode == 1, run.stdout + run.stderr
    slower = [line for line in run.stdout.splitlines() if line.endswith("SLOWER")]
    assert len(slower) == 1 and "add_scalar host forward cpu" in slower[0]


def test_compare_passes_where_nothing_changed(results, report, capsys):
    same = report.load(results / "results.json")
    assert report.compare(same, same, 0.0) == 0
    assert "+0.0%  add_scalar host forward cpu" in capsys.readouterr().out


def test_compare_says_where_nothing_can_be_compared(results, report):
    some = report.load(results / "results.json")
    assert report.compare(some | {"records": []}, some, 0.0) == 2


def test_list_measures_nothing(tmp_path):
    run = benchmark("--list", "--full", "--only", "^scale_add_relu, learnable .* bfloat16", "--output", tmp_path / "no")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "3 rows, 3 of them with torch.compile" in run.stderr
    assert run.stdout.splitlines()[0].endswith("bfloat16 contiguous 2x64x56x56, compile")
    assert not (tmp_path / "no").exists()


def test_what_is_wrong_is_not_timed(scripts):
    """Not even one element; but at a ReLU's zero rounding may go either way."""
    measure, table = importlib.import_module("measure"), importlib.import_module("table")
    (form,) = [form for form in table.BY_SIZE if form.name == "relu, one bit"]
    case = table.Case("sizes", form, torch.float32, (1024,), "contiguous", table.CONTIGUOUS, ("forward", "backward"))
    with torch.no_grad():
        (x,) = args = case.make("cpu")
        x[7], x[8] = 1.0, 5e-9
    seventh = torch.arange(1024) == 7

    def check(ours):
        measure.check(case, {"ours": ours}, args, torch.ones(1024))

    check(form.ours)
    measure.check(case, {"eager": form.stock}, args, torch.zeros(1024))  # right, though no share of it can be wrong
    check(lambda x: torch.relu(x - 1e-8))
    with pytest.raises(AssertionError, match="the values of ours must be those of the reference"):
        check(lambda x: torch.relu(x) + 0.001 * seventh)
    with pytest.raises(AssertionError, match="the gradients of ours must be those of the reference"):
        check(lambda x: torch.relu(x) + 0.001 * seventh * (x - x.detach()))
