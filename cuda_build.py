"""Whether setup.py builds the CUDA kernels, with which toolkit, for which GPUs. Not part of what is installed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

FALLBACK = "/usr/local/cuda"
ARCHS = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")  # Turing to Blackwell


class Cuda(NamedTuple):
    home: str
    version: str
    archs: str  # as in TORCH_CUDA_ARCH_LIST: "8.0;9.0+PTX"

    def __str__(self):
        return f"CUDA {self.version} ({self.home}) for {self.archs}"


def decide(torch):
    """Return the Cuda to build with, or a sentence that says why there is none."""
    force = os.environ.get("FORCE_CUDA", "")
    if force not in ("", "0", "1"):
        fail(f"FORCE_CUDA must be 0 or 1, got {force!r}.")
    if force == "0":
        return "FORCE_CUDA=0"
    home = find_toolkit()
    if torch.version.cuda is None:
        lacking = f"torch {torch.__version__} is a build without CUDA; install one with CUDA"
    elif home is None:
        lacking = (
            f"no CUDA toolkit was found; install CUDA {torch.version.cuda}, or set CUDA_HOME to the folder that holds "
            "bin/nvcc and include/cuda_runtime.h"
        )
    else:
        version = re.search(r"release (\d+\.\d+)", _output(f"{home}/bin/nvcc", "--version"))[1]
        if version.split(".")[0] != torch.version.cuda.split(".")[0]:
            fail(
                f"torch {torch.__version__} is built with CUDA {torch.version.cuda}, but the toolkit in {home} is CUDA "
                f"{version}, and the major versions must agree: set CUDA_HOME to another toolkit, install another "
                "torch, or set FORCE_CUDA=0 for the CPU kernels only."
            )
        archs = os.environ.get("TORCH_CUDA_ARCH_LIST") or default_archs(home, torch.cuda)
        return Cuda(home, version, archs.replace(" ", ";"))
    if force == "1":
        fail(f"FORCE_CUDA=1, but {lacking}.")
    return lacking


def find_toolkit():
    """Return the folder that holds bin/nvcc and the headers, or None.

    The nvcc on PATH may be a link to the real one, or a script that calls it, away from the headers; then torch's own
    guess is wrong. nvcc itself knows its place (TOP).
    """
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):
        roots += [Path(nvcc).resolve().parents[1], *re.findall("TOP=(.+)", _output(nvcc, "--dryrun", "x.cu"))]
    for root in (Path(root).resolve() for root in [*roots, FALLBACK] if root):
        if (root / "bin/nvcc").is_file() and (root / "include/cuda_runtime.h").is_file():
            return str(root)
    return None


def default_archs(home, gpus):
    """The GPUs of this machine, or else ARCHS; a GPU that the toolkit does not know yet runs the PTX at their end."""
    known = re.findall(r"compute_(\d+)(\d)\b", _output(f"{home}/bin/nvcc", "--list-gpu-arch"))
    known = {f"{major}.{minor}" for major, minor in known}
    here = {"{}.{}".format(*gpus.get_device_capability(i)) for i in range(gpus.device_count())}
    archs = here if here and here <= known else known.intersection(ARCHS)
    return ";".join(sorted(archs, key=float)) + "+PTX"


def fail(message):
    sys.exit(f"my_cuda_op: {message}")


def _output(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
