"""Scale (``x * s``), add_scalar (``x + a``), ReLU and what is fused of them, forward and backward, for PyTorch.

Functions are in :mod:`my_cuda_op.functional` and here, layers in :mod:`my_cuda_op.nn`, the dispatcher's operators in
``torch.ops.my_cuda_op``.
"""

from __future__ import annotations

import torch  # before _C, which is linked against the libraries that this loads

try:
    from my_cuda_op import _C
except ImportError as error:
    raise ImportError(
        f"my_cuda_op: the compiled part, my_cuda_op._C, must be beside {__file__}, got: {error}. Where these are the "
        "sources and not the installed package: start Python in another folder, or build it here with "
        "`python setup.py build_ext --inplace`."
    ) from error
if _C.torch_version.split(".")[:2] != torch.__version__.split(".")[:2]:  # before anything of it is called
    raise ImportError(
        f"my_cuda_op: it must be built with the torch that is installed, {torch.__version__}, and was built with "
        f"{_C.torch_version}: type `python -m pip install .` in the folder of its sources."
    )
from my_cuda_op import functional, library, nn  # noqa: F401
from my_cuda_op.functional import *  # noqa: F403
from my_cuda_op.functional import add_scalar, relu, scale
from my_cuda_op.routing import compile_with

__version__: str = _C.__version__

__all__ = [
    *functional.__all__,
    "add_scalar_forward",
    "build_info",
    "compile_with",
    "functional",
    "multiply_by_two_forward",
    "my_custom_relu",
    "nn",
]


def build_info() -> dict:
    """How the installed package was built: ``cuda`` (the toolkit's version, or None), ``archs`` and ``torch``."""
    return {
        "cuda": _C.cuda_version or None,
        "archs": _C.cuda_archs.split(";") if _C.cuda_archs else [],
        "torch": _C.torch_version,
    }


def multiply_by_two_forward(x: torch.Tensor) -> torch.Tensor:
    """``x * 2``: the tutorial's first function."""
    return scale(x, 2)


def add_scalar_forward(x: torch.Tensor, scalar: functional.Parameter) -> torch.Tensor:
    """``x + scalar``: the tutorial's second function."""
    return add_scalar(x, scalar)


def my_custom_relu(x: torch.Tensor) -> torch.Tensor:
    """``torch.relu(x)``: the tutorial's third function."""
    return relu(x)
