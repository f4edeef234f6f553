"""What every test file shares: which my_cuda_op is tested, on which devices, and from which seed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import torch
from _pytest.junitxml import xml_key

ROOT = Path(__file__).resolve().parents[1]

# The installed package is tested: `python -m pytest` puts the folder it starts in first, where the sources, or what an
# earlier build left beside them, would hide it. Only where none is installed, what was built in place.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
if importlib.util.find_spec("my_cuda_op") is None and any(
    path.suffix in (".so", ".pyd") for path in (ROOT / "my_cuda_op").glob("_C*")
):
    sys.path.insert(0, str(ROOT))

try:
    import my_cuda_op
except ImportError as error:
    raise pytest.UsageError(
        f"my_cuda_op cannot be imported: {error}. The tests need the compiled package: `python -m pip install .`, or "
        "`python setup.py build_ext --inplace` to test the checkout itself (make test does the first)."
    ) from error

if torch.cuda.is_available() and my_cuda_op.build_info()["cuda"] is None:
    raise pytest.UsageError(
        "this machine has a GPU and a CUDA build of torch, but my_cuda_op was built without CUDA kernels, so half "
        "of it would go untested. Rebuild it with FORCE_CUDA=1, or hide the GPU: CUDA_VISIBLE_DEVICES= python -m pytest"
    )

if not torch.distributed.is_available():
    collect_ignore = ["test_distributed.py"]

# Which examples are drawn must not decide whether a change may be merged; away from CI, every run tries new ones.
hypothesis.settings.register_profile(
    "local", deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], print_blob=True
)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("local"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_report_header():
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    folder = Path(my_cuda_op.__file__).parent
    return [
        f"my_cuda_op {my_cuda_op.__version__} from {folder}, built with {my_cuda_op.build_info()}",
        f"torch {torch.__version__}, GPUs: {', '.join(gpus) or 'none, so the CUDA half is skipped'}",
    ]


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_cuda)])
def device(request):
    """Each device that has kernels. A test with this argument runs on all of them."""
    return request.param


@pytest.fixture(params=[pytest.param("cuda", marks=needs_cuda)])
def cuda(request):
    """For what only CUDA has."""
    return request.param


@pytest.fixture
def needs_memory(cuda):
    """``needs_memory(gib)`` skips the test where the GPU has less than that free."""

    def check(gib):
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] / 2**30
        if free < gib:
            pytest.skip(f"needs {gib} GiB of GPU memory, {free:.0f} are free")

    yield check
    torch.cuda.empty_cache()


def pytest_sessionstart(session):
    """Tells a --junitxml report what docs/compatibility.py reads of it. Here, because pytest-xdist loses what
    record_testsuite_property says: the report is written by the process that runs no test."""
    if report := session.config.stash.get(xml_key, None):
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        report.add_global_property("torch", torch.__version__)
        report.add_global_property("device", torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU")
        report.add_global_property("commit", os.environ.get("GIT_COMMIT") or commit or "unknown")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
