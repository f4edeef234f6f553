"""Compile my_cuda_op._C: the CPU kernels always, the CUDA kernels where torch is a CUDA build and a toolkit is found.

What the package is stands in pyproject.toml. Environment variables:
    FORCE_CUDA            1 fails where the CUDA kernels cannot be built, 0 leaves them out
    CUDA_HOME             the toolkit to use, where there are several
    TORCH_CUDA_ARCH_LIST  for example "8.0;9.0+PTX"; the default is the GPUs of this machine, or without one
                          7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX as far as the toolkit goes
    MAX_JOBS              how many compilers run at a time
"""

import importlib.util
import os
import re
import site
import sys
from glob import glob
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # which pip's build leaves out
import cuda_build  # noqa: E402

# The environment in which pip builds has no torch, and must not get one of its own: what is compiled here fits only the
# torch that it was compiled against, so that has to be the installed one.
if importlib.util.find_spec("torch") is None:
    sys.path += site.getsitepackages() + ([site.getusersitepackages()] if sys.prefix == sys.base_prefix else [])
if importlib.util.find_spec("torch") is None:
    cuda_build.fail(
        "torch is not installed here: type `python -m pip install torch`, then install my_cuda_op again "
        "(with --no-build-isolation, if torch is installed and the build does not see it)."
    )
import torch  # noqa: E402

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
    cuda_build.fail(
        f"torch must be 2.11 or newer, got {torch.__version__}: type `python -m pip install 'torch>=2.11'`, then "
        "install my_cuda_op again."
    )

version = re.search('^version = "(.+)"', (HERE / "pyproject.toml").read_text(), re.M)[1]
macros = {"VERSION": version, "TORCH_VERSION": torch.__version__}
sources = glob("csrc/**/*.cpp", recursive=True)
cuda = cuda_build.decide(torch)
with_cuda = isinstance(cuda, cuda_build.Cuda)
if with_cuda:
    sources += glob("csrc/**/*.cu", recursive=True)
    macros.update(CUDA_VERSION=cuda.version, CUDA_ARCHS=cuda.archs)
    os.environ.update(CUDA_HOME=cuda.home, TORCH_CUDA_ARCH_LIST=cuda.archs)
from torch.utils import cpp_extension  # noqa: E402  (it reads CUDA_HOME)


class Build(cpp_extension.BuildExtension):
    def run(self):
        kernels = f"CPU and CUDA kernels with {cuda}" if with_cuda else f"CPU kernels only ({cuda})"
        print(f"my_cuda_op {version}: building {kernels} against torch {torch.__version__}", flush=True)
        self.force = True  # a _C left by an earlier build may be newer than the sources and yet fit another torch
        super().run()


extension = (cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension)(
    "my_cuda_op._C",
    sorted(sources),
    include_dirs=[str(HERE / "csrc")],  # absolute, because ninja runs elsewhere
    # -g0: Python's own flags ask for debug information, which takes longer to write than the code.
    # -fvisibility=hidden: as pybind11's types are, and so must be those that hold one.
    extra_compile_args={"cxx": ["-O3", "-g0", "-fvisibility=hidden"], "nvcc": ["-O3"]},
    # For every file, so that a build for another torch or architecture takes none over from the last one.
    define_macros=[(f"MY_CUDA_OP_{name}", f'"{value}"') for name, value in macros.items()],
)
setup(ext_modules=[extension], cmdclass={"build_ext": Build})
