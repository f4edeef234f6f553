"""The benchmarks run, write what README.md promises, and notice what became slower. How fast anything is, they say."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[1] / "benchmarks" / "run.py"
FEW = r"^relu (forward|backward) float32 contiguous 1024$|^scale, learnable step .* channels_last|^add_scalar host"


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


def test_results_say_what_was_measured_and_where(results):
    written = json.loads((results / "results.json").read_text())
    fields = {"date", "device", "cpu", "gpu", "driver", "torch", "cuda", "my_cuda_op", "build", "commit"}
    assert fields <= written["environment"].keys()
    assert written["environment"]["commit"] == "0123abc"
    by_id = {record["id"]: record for record in written["records"]}
    relu, step = "relu {} float32 contiguous 1024", "scale, learnable step float32 channels_last 2x64x56x56"
    hosts = {"add_scalar host forward cpu", "add_scalar host step cpu"}
    assert by_id.keys() == {relu.format("forward"), relu.format("backward"), step} | hosts
    for name, record in by_id.items():
        assert min(record["us"].values()) > 0 and {"ours", "eager"} <= record["us"].keys()
        assert "ceiling" in record["us"] or name in hosts
    assert by_id[relu.format("forward")]["bytes"] == 2 * 1024 * 4
    assert by_id[relu.format("backward")]["saved_bytes"]["eager"] == 1024 * 4


def test_results_can_be_read_and_seen(results):
    text = (results / "results.md").read_text()
    for record in json.loads((results / "results.json").read_text())["records"]:
        assert f"| `{record['id']}` |" in text
    pytest.importorskip("matplotlib")
    plots = {path.stem: path.read_bytes() for path in results.glob("*.png")}
    assert plots.keys() == {"bandwidth-relu", "channels", "host", "saved"}
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


def test_compare_passes_where_nothing_changed(results, capsys):
    spec = importlib.util.spec_from_file_location("benchmarks_report", RUN.with_name("report.py"))
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    same = report.load(results / "results.json")
    assert report.compare(same, same, 0.0) == 0
    assert "+0.0%  add_scalar host forward cpu" in capsys.readouterr().out
