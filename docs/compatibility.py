"""Writes compatibility.md from what the tests said: python docs/compatibility.py [build/report.xml ...]

Each report is what `python -m pytest --junitxml=build/report.xml` wrote with one torch. The outcomes go to
compatibility.json; without a report the table is written anew from that file.
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

DOCS = Path(__file__).parent

# {section: {feature: tests}}; tests: a regular expression for the beginning of "file::test[parameters]".
FEATURES = {
    "Operators": {
        "Values, dtypes and strides of stock": "test_values::|test_properties::test_forward",
        "PyTorch's own samples": "test_opinfo::test_samples",
        "In place, views included": "test_inplace::",
        "Errors of stock": "test_errors::",
        "torch.library.opcheck": "test_library::test_opcheck",
    },
    "Autograd": {
        "Gradients for every layout": "test_backward::|test_properties::test_gradients",
        "gradcheck: reverse, forward, batched, undefined": "test_autograd::test_first_derivatives",
        "gradgradcheck: reverse and forward over reverse": "test_autograd::test_second_derivatives",
        "Third derivatives": "test_autograd::test_third_derivatives",
        "Forward mode of forward mode": "test_autograd::test_forward_mode_of_forward_mode",
        "Dual numbers beside requires_grad": "test_autograd::test_dual_numbers",
        "no_grad, inference_mode": "test_modes::test_(without_grad|an_inference)|test_inplace::test_inference",
        "Anomaly mode": "test_modes::test_anomaly_mode",
        "saved_tensors_hooks": "test_modes::test_saved_tensors_hooks|test_graph::test_(forgets|exception)",
        "Checkpointing, reentrant or not": "test_modes::test_activation_checkpoint",
        "Selective checkpointing": "test_modes::test_selective_checkpoint",
    },
    "torch.func": {
        **{name: rf"test_autograd::test_function_transforms\[\w+-{name}-" for name in ("grad", "vjp", "jvp")},
        "jacrev, jacfwd": r"test_autograd::test_function_transforms\[\w+-jac\w+-",
        "hessian": r"test_autograd::test_function_transforms\[\w+-hessian-",
        "Nested transforms": r"test_autograd::test_function_transforms\[\w+-\w+ of ",
        "vmap over any dimensions": "test_autograd::test_vmap_over_any_dimensions",
        "vmap in place": "test_autograd::test_vmap_in_place_writes",
        "vmap in place, of a tensor without the batch": "test_autograd::test_vmap_in_place_refuses",
        "Gradients for each sample of a layer": "test_autograd::test_per_sample",
    },
    "torch.compile": {
        "One graph, forward and backward": "test_compile::test_forward_and_backward",
        "Inductor, static and dynamic shapes": "test_compile::test_inductor",
        "Layers: training steps": "test_compile::test_training_step",
        "In place, with the returned value dropped": "test_compile::test_in_place",
        "Half precision rounds once": "test_compile::test_half_precision",
        "Strides as without compiling": "test_compile::test_strides",
        "No recompilation beyond stock's": "test_compile::test_a_changing",
        'mode="reduce-overhead"': "test_compile::test_reduce_overhead",
        "grad, jvp, vmap, hessian inside": "test_compile::test_transforms_",
        "hessian of two arguments inside": r"test_compile::test_nested\w+\[hessian of two",
        "vmap of hessian inside": r"test_compile::test_nested\w+\[vmap of hessian",
        "hessian of hessian inside": r"test_compile::test_nested\w+\[hessian of hessian",
        "Compiled autograd of calls outside of the compiled part": "test_graph::test_compiled_autograd",
    },
    'torch.compile with `compile_with("kernels")`': {
        "One graph of our operators, both ways": "test_compile_choice::test_(forward|without|resid|in_)",
        "Half precision rounds once": "test_compile_choice::test_half_precision",
        "Every layout": "test_compile_choice::test_layouts",
        "Inductor, static and dynamic shapes": "test_compile_choice::test_inductor",
        'mode="reduce-overhead"': "test_compile_choice::test_reduce_overhead",
        "grad, jvp, vmap, hessian inside": "test_compile_choice::test_transforms_inside",
        "Tensors that wrap others": "test_compile_choice::test_tensors_that_wrap",
        "torch.export, saved and reloaded": "test_compile_choice::test_export",
        "Another choice at any time": "test_compile_choice::test_(a_change|a_choice|the_choice)",
    },
    "Export": {
        "torch.export, saved and reloaded, dynamic batch": "test_export::test_(saved|decompositions|functions)",
        "Gradients of the exported module": "test_export::test_gradients",
        "AOTInductor package": "test_export::test_aot_inductor",
        "FX symbolic trace": "test_nn::test_fx",
    },
    "Modes and wrappers": {
        "Autocast": "test_modes::test_autocast",
        "Autocast with GradScaler": "test_modes::test_grad_scaler",
        "FakeTensorMode and meta tensors": "test_modes::test_fake|test_library::test_(fake|meta)",
        "`__torch_function__` subclasses and modes": "test_modes::test_torch_function",
        "TorchDispatchMode sees the operators": "test_modes::test_torch_dispatch",
        "FlopCounterMode, profiler": "test_modes::test_flop_counter",
        "Backward hooks of modules": "test_nn::test_full_backward_hook",
        "Parametrizations": "test_nn::test_parametrization",
        "Threads": "test_modes::test_threads",
        "torch.multiprocessing, workers of a DataLoader": "test_modes::test_(multiprocessing|data_loader)",
    },
    "Two processes": {
        "DDP": r"test_distributed::test_distributed\[\w+-DDP",
        "FSDP2": r"test_distributed::test_distributed\[\w+-FSDP2",
        "DTensor, by any placement": r"test_distributed::test_distributed\[\w+-(scale|add_scalar|relu)",
        "Data and tensor parallel by DTensor": r"test_distributed::test_distributed\[\w+-(data|tensor) parallel",
    },
    "torch.ops.my_cuda_op": {
        "Autograd": r"test_library::test_requires_grad\[.*[^_]\.\w+\]",
        "Dual numbers": r"test_library::test_dual_numbers\[.*[^_]\.\w+\]",
        "torch.func": "test_library::test_function_transforms",
        "Derivatives of operators in place": r"test_library::test_(requires_grad|dual_numbers)\[.*_\.\w+\]",
    },
    "CUDA": {
        "Side streams": "test_cuda::test_work_on_a_side_stream",
        "CUDA graphs, forward and backward": "test_cuda::test_graph_capture",
        "No hidden synchronisation": "test_cuda::test_nothing_waits",
        "Deterministic algorithms": "test_cuda::test_the_same_bits",
        "A second GPU": "test_large::test_second_gpu",
    },
}

ISSUE = "https://github.com/pytorch/pytorch/issues/"
# Why a feature is not there. Of those in REFUSED the tests show that a call says so, instead of giving a wrong result.
REASONS = {
    "vmap in place, of a tensor without the batch": (
        "There is no room in it for the results; stock operators in place refuse it, too.",
        97248,
    ),
    "hessian of two arguments inside": (
        "Dynamo of torch 2.11 fails on it, with stock functions too.",
        None,
    ),
    "vmap of hessian inside": ("Dynamo fails on it, with stock functions too.", 183015),
    "hessian of hessian inside": ("Dynamo fails on it, with stock functions too.", 154284),
    "Compiled autograd of calls outside of the compiled part": (
        "It takes nodes in C++ only if they can be traced, and ours calls Python; what torch.compile traces from its "
        "forward on works.",
        134514,
    ),
    "Derivatives of operators in place": (
        "`torch.library.register_autograd` takes functional operators only; `my_cuda_op.functional` has them.",
        None,
    ),
}
REFUSED = {
    "vmap in place, of a tensor without the batch",
    "Compiled autograd of calls outside of the compiled part",
    "Derivatives of operators in place",
}


def outcome(case) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"


def read(path: str) -> dict:
    """Of one report: what was tested, and {feature: {outcome: how many}}."""
    (suite,) = ElementTree.parse(path).getroot().iter("testsuite")
    about = {p.get("name"): p.get("value") for p in suite.find("properties").iter("property")}
    cases = [(f"{c.get('classname').rpartition('.')[2]}::{c.get('name')}", outcome(c)) for c in suite.iter("testcase")]
    features = {
        f"{section}: {feature}": dict(sorted(Counter(o for name, o in cases if re.match(tests, name)).items()))
        for section, rows in FEATURES.items()
        for feature, tests in rows.items()
    }
    return {**about, "total": dict(sorted(Counter(o for _, o in cases).items())), "features": features}


def cell(feature: str, counts: dict) -> str:
    if counts.get("failed") or counts.get("xfailed"):
        return "no"
    if not counts.get("passed"):
        return "not run"
    return "no" if feature in REFUSED else "yes"


def table(runs: list[dict]) -> str:
    notes = []
    lines = [
        "# Compatibility",
        "",
        "Written by `python docs/compatibility.py` from the outcomes of the tests; each cell is that of the tests that "
        "the script names for it. What is not run needs a GPU, or a module that was not there.",
        "",
        "| | " + " | ".join(f"torch {run['torch']}" for run in runs) + " |",
        "|---" * (len(runs) + 1) + "|",
        "| device | " + " | ".join(run["device"] for run in runs) + " |",
        "| commit | " + " | ".join(run["commit"] for run in runs) + " |",
        "| tests | "
        + " | ".join(", ".join(f"{n} {outcome}" for outcome, n in run["total"].items()) for run in runs)
        + " |",
    ]
    for section, rows in FEATURES.items():
        lines.append(f"| **{section}** |" + " |" * len(runs))
        for feature in rows:
            counts = [run["features"].get(f"{section}: {feature}", {}) for run in runs]
            if not any(counts):
                sys.exit(f"{section}: {feature}: it must match a test, but {rows[feature]!r} matches none")
            cells = [cell(feature, c) for c in counts]
            if "no" in cells:
                if feature not in REASONS:
                    sys.exit(f"{section}: {feature}: a 'no' must have a reason in REASONS, got {counts}")
                if feature not in notes:
                    notes.append(feature)
                cells = [f"no[^{notes.index(feature) + 1}]" if c == "no" else c for c in cells]
            lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    lines.append("")
    for i, feature in enumerate(notes):
        reason, issue = REASONS[feature]
        link = f" [pytorch#{issue}]({ISSUE}{issue})" if issue else " No public issue is known."
        lines.append(f"[^{i + 1}]: {reason}{link}")
    return "\n".join(lines) + "\n"


def main(reports: list[str]) -> None:
    outcomes = DOCS / "compatibility.json"
    runs = [read(path) for path in reports] if reports else json.loads(outcomes.read_text())
    text = table(runs)
    (DOCS / "compatibility.md").write_text(text)
    outcomes.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
