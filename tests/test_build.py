"""The promises of the build: what is decided, what an sdist holds, and what the installed package says of itself.

Nothing is compiled here: setup.py runs with a torch and a CUDA toolkit that are faked.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools
import torch

import my_cuda_op

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("cuda_build", ROOT / "cuda_build.py")
cuda_build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cuda_build)

ALL_ARCHS = "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"


def run(*args, cwd, **env):
    """Run Python away from the checkout, and without what this process has in its environment for builds."""
    build = ("FORCE_CUDA", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "PYTHONPATH")
    env = {k: v for k, v in os.environ.items() if k not in build} | {k: str(v) for k, v in env.items()}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True)


# What the installed package says


@pytest.mark.parametrize("first, second", [("my_cuda_op", "torch"), ("torch", "my_cuda_op")])
def test_imports_from_any_directory_and_in_any_order(first, second, tmp_path):
    code = f"import {first}, {second}; print(my_cuda_op.relu(torch.tensor([-1.0, 2.0])).tolist())"
    done = run("-c", code, cwd=tmp_path)
    assert done.stdout == "[0.0, 2.0]\n", done.stderr


def test_version_is_that_of_pyproject():
    version = re.search('^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert my_cuda_op.__version__ == version == importlib.metadata.version("my_cuda_op")


def test_build_info_names_the_torch_it_was_built_against():
    assert my_cuda_op.build_info()["torch"] == torch.__version__


def test_another_torch_than_it_was_built_with_is_refused(tmp_path):
    code = "import torch; torch.__version__ = '2.99.0'; import my_cuda_op"
    done = run("-c", code, cwd=tmp_path)
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith("ImportError: my_cuda_op: ")
    for word in ("2.99.0", torch.__version__, "`python -m pip install .`"):
        assert word in sentence


def test_build_info_tells_the_cuda_kernels_in_the_binary():
    info = my_cuda_op.build_info()
    assert sorted(info["archs"]) == sorted(embedded_archs(Path(my_cuda_op._C.__file__).read_bytes()))
    assert (info["cuda"] is None) == (info["archs"] == [])


def embedded_archs(binary):
    """The architectures of the machine code in nvcc's fat binaries, and of the PTX."""
    found = set()
    for container in re.finditer(re.escape(struct.pack("<IHH", 0xBA55ED50, 1, 16)), binary):
        position = container.start() + 16
        end = position + struct.unpack_from("<Q", binary, container.start() + 8)[0]
        while position < end:
            kind, header, size, arch = struct.unpack_from("<H2xIQ12xI", binary, position)
            found.add((arch, kind == 1))
            position += header + size
    return [f"{a // 10}.{a % 10}" + "+PTX" * ((a, True) in found) for a in sorted({a for a, _ in found})]


# What is decided


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A function that makes a toolkit of some version; none is in sight before."""
    monkeypatch.setattr(cuda_build, "FALLBACK", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    for name in ("CUDA_HOME", "CUDA_PATH", "FORCE_CUDA", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    return lambda version="13.0", name="cuda 13": make_toolkit(tmp_path / name, version)


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def make_toolkit(root, version):
    newest = "100 120" if version.startswith("13") else ""
    archs = " ".join(f"compute_{arch}" for arch in f"75 80 86 87 89 90 {newest}".split())
    nvcc = f"""case "$1" in
        --version) echo "Cuda compilation tools, release {version}, V{version}.1";;
        --list-gpu-arch) printf "%s\\n" {archs};;
        --dryrun) echo "#$ TOP={root}/bin/.." >&2;;
    esac
    """
    script(root / "bin/nvcc", nvcc)
    (root / "include").mkdir()
    (root / "include/cuda_runtime.h").touch()
    return root


def fake_torch(cuda, *gpus):
    return SimpleNamespace(
        __version__="2.14.1",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(device_count=lambda: len(gpus), get_device_capability=lambda i: gpus[i]),
    )


def test_no_toolkit(toolkit):
    assert cuda_build.find_toolkit() is None


def test_toolkit_behind_a_script_on_the_path(toolkit, tmp_path):
    root = toolkit()
    script(tmp_path / "path/nvcc", f'exec "{root}/bin/nvcc" "$@"\n')
    assert cuda_build.find_toolkit() == str(root)


def test_toolkit_behind_a_link_on_the_path(toolkit, tmp_path):
    root = toolkit()
    script(root / "bin/nvcc", "exit 1\n")  # so that only the link can tell
    (tmp_path / "path").mkdir()
    (tmp_path / "path/nvcc").symlink_to(root / "bin/nvcc")
    assert cuda_build.find_toolkit() == str(root)


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_toolkit_that_is_named_comes_before_the_one_on_the_path(variable, toolkit, tmp_path, monkeypatch):
    named, other = toolkit(), toolkit("12.6", "cuda 12")
    script(tmp_path / "path/nvcc", f'exec "{other}/bin/nvcc" "$@"\n')
    monkeypatch.setenv(variable, str(named))
    assert cuda_build.find_toolkit() == str(named)


def test_toolkit_without_headers_is_passed_over(toolkit, monkeypatch):
    bare, whole = toolkit(name="bare"), toolkit()
    (bare / "include/cuda_runtime.h").unlink()
    monkeypatch.setenv("CUDA_HOME", str(bare))
    monkeypatch.setattr(cuda_build, "FALLBACK", str(whole))
    assert cuda_build.find_toolkit() == str(whole)


@pytest.mark.parametrize(
    "version, gpus, archs",
    [
        ("13.0", [], ALL_ARCHS),
        ("12.6", [], "7.5;8.0;8.6;8.9;9.0+PTX"),
        ("13.0", [(9, 0)], "9.0+PTX"),
        ("13.0", [(12, 0), (8, 7), (8, 7)], "8.7;12.0+PTX"),
        ("12.6", [(12, 0)], "7.5;8.0;8.6;8.9;9.0+PTX"),  # the toolkit does not know this GPU: it runs the PTX
    ],
)
def test_default_archs(version, gpus, archs, toolkit, monkeypatch):
    root = toolkit(version)
    monkeypatch.setenv("CUDA_HOME", str(root))
    assert cuda_build.decide(fake_torch(version, *gpus)) == (str(root), version, archs)


def test_arch_list_is_honoured(toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit()))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0+PTX")
    assert cuda_build.decide(fake_torch("13.2", (7, 5))).archs == "8.0;9.0+PTX"


@pytest.mark.parametrize(
    "force, cuda, version, reason",
    [
        ("", None, "13.0", "torch 2.14.1 is a build without CUDA; install one with CUDA"),
        ("", "13.0", None, "no CUDA toolkit was found; install CUDA 13.0, or set CUDA_HOME"),
        ("0", "13.0", "13.0", "FORCE_CUDA=0"),
        ("0", "13.0", "12.6", "FORCE_CUDA=0"),
    ],
)
def test_cpu_only(force, cuda, version, reason, toolkit, monkeypatch):
    monkeypatch.setenv("FORCE_CUDA", force)
    monkeypatch.setenv("CUDA_HOME", str(toolkit(version)) if version else "")
    assert cuda_build.decide(fake_torch(cuda)).startswith(reason)


@pytest.mark.parametrize(
    "force, cuda, version, words",
    [
        ("1", None, "13.0", ["FORCE_CUDA=1", "torch 2.14.1 is a build without CUDA", "install"]),
        ("1", "13.0", None, ["FORCE_CUDA=1", "no CUDA toolkit", "install CUDA 13.0", "set CUDA_HOME"]),
        ("", "13.0", "12.6", ["CUDA 13.0", "cuda 13 is CUDA 12.6", "CUDA_HOME", "another torch", "FORCE_CUDA=0"]),
        ("yes", "13.0", "13.0", ["FORCE_CUDA must be 0 or 1, got 'yes'"]),
    ],
)
def test_errors_say_what_is_wrong_and_the_way_out(force, cuda, version, words, toolkit, monkeypatch):
    monkeypatch.setenv("FORCE_CUDA", force)
    monkeypatch.setenv("CUDA_HOME", str(toolkit(version)) if version else "")
    with pytest.raises(SystemExit) as error:
        cuda_build.decide(fake_torch(cuda))
    assert [word for word in words if word not in error.value.code] == []


# What setup.py does


@pytest.fixture
def checkout(tmp_path):
    """A copy of the sources: no build, no metadata, nothing that an earlier run has left."""
    copy = tmp_path / "the checkout"
    copy.mkdir()
    for path in ROOT.iterdir():
        if path.name in ("csrc", "my_cuda_op", "tests", "benchmarks", "examples", "docs"):
            shutil.copytree(path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        elif path.is_file():
            shutil.copy(path, copy)
    return copy


FAKE_TORCH = """
import os
from types import SimpleNamespace

__version__ = os.environ.get("FAKE_TORCH_VERSION", "2.14.1")
version = SimpleNamespace(cuda=os.environ.get("FAKE_TORCH_CUDA"))
cuda = SimpleNamespace(device_count=lambda: 0)
"""
FAKE_CPP_EXTENSION = """
import json, os
from setuptools import Extension as CppExtension
from setuptools.command.build_ext import build_ext

CUDA_HOME = os.environ.get("CUDA_HOME")

class CUDAExtension(CppExtension):
    pass

class BuildExtension(build_ext):
    def build_extensions(self):
        [e] = self.extensions
        print(json.dumps([type(e).__name__, e.sources, dict(e.define_macros), CUDA_HOME]))
"""


@pytest.fixture
def fake_site(tmp_path):
    """A folder for PYTHONPATH with a torch that compiles nothing, but prints what it would compile."""
    torch = tmp_path / "site/torch"
    (torch / "utils").mkdir(parents=True)
    (torch / "__init__.py").write_text(FAKE_TORCH)
    (torch / "utils/__init__.py").touch()
    (torch / "utils/cpp_extension.py").write_text(FAKE_CPP_EXTENSION)
    return torch.parent


def what_is_built(checkout, **env):
    done = run("setup.py", "build_ext", cwd=checkout, **env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    [said] = [line for line in lines if line.startswith("my_cuda_op")]
    return said, *json.loads(lines[-1])


def sources_of(checkout, *suffixes):
    return sorted(str(p.relative_to(checkout)) for p in (checkout / "csrc").rglob("*") if p.suffix in suffixes)


def test_builds_cpu_and_cuda(checkout, fake_site, tmp_path):
    root = make_toolkit(tmp_path / "cuda 13", "13.0")
    env = {"PYTHONPATH": fake_site, "FAKE_TORCH_CUDA": "13.2", "CUDA_HOME": f"{root}/bin/.."}
    said, kind, sources, macros, home = what_is_built(checkout, **env)
    kernels = f"CPU and CUDA kernels with CUDA 13.0 ({root}) for {ALL_ARCHS}"
    assert said == f"my_cuda_op {my_cuda_op.__version__}: building {kernels} against torch 2.14.1"
    assert (kind, home) == ("CUDAExtension", str(root))
    assert sources == sources_of(checkout, ".cpp", ".cu")
    assert macros["MY_CUDA_OP_CUDA_VERSION"] == '"13.0"' and macros["MY_CUDA_OP_CUDA_ARCHS"] == f'"{ALL_ARCHS}"'


def test_builds_cpu_only(checkout, fake_site):
    said, kind, sources, macros, _ = what_is_built(checkout, PYTHONPATH=fake_site)
    kernels = "CPU kernels only (torch 2.14.1 is a build without CUDA; install one with CUDA)"
    assert said == f"my_cuda_op {my_cuda_op.__version__}: building {kernels} against torch 2.14.1"
    assert kind in ("CppExtension", "Extension")
    assert sources == sources_of(checkout, ".cpp")
    assert sorted(macros) == ["MY_CUDA_OP_TORCH_VERSION", "MY_CUDA_OP_VERSION"]


def test_a_torch_that_is_too_old_is_refused(checkout, fake_site):
    done = run("setup.py", "build_ext", cwd=checkout, PYTHONPATH=fake_site, FAKE_TORCH_VERSION="2.9.1+cpu")
    assert (done.returncode, done.stdout) == (1, "")
    [sentence] = done.stderr.splitlines()
    assert "torch must be 2.11 or newer, got 2.9.1+cpu" in sentence and "pip install 'torch>=2.11'" in sentence


def test_sdist_contains_every_source(checkout, fake_site):
    sources = (".py", ".pyi", ".typed", ".cpp", ".h", ".cu", ".cuh", ".md", ".toml")
    expected = [p.relative_to(checkout) for p in checkout.rglob("*") if p.suffix in sources]
    expected += [Path("LICENSE"), Path("Makefile"), Path(".clang-format")]
    done = run("setup.py", "sdist", "--formats=gztar", cwd=checkout, PYTHONPATH=fake_site)  # no CUDA: the harder case
    assert done.returncode == 0, done.stderr
    [archive] = (checkout / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {Path(*Path(name).parts[1:]) for name in tar.getnames()}
    assert sorted(set(expected) - packed) == []


SITECUSTOMIZE = """
import os, site, sys

hidden = [*site.getsitepackages(), site.getusersitepackages()]
sys.path[:] = [path for path in sys.path if path not in hidden]
if "NOTHING_INSTALLED" in os.environ:
    site.getsitepackages, site.getusersitepackages = (lambda: []), (lambda: "")
"""


@pytest.fixture
def build_environment(tmp_path):
    """A folder for PYTHONPATH that makes what pip builds in: setuptools is there, and no other installed package."""
    site = tmp_path / "build environment"
    site.mkdir()
    for name in ("setuptools", "_distutils_hack"):
        (site / name).symlink_to(Path(setuptools.__file__).parents[1] / name)
    (site / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return site


def test_isolated_build_is_against_the_installed_torch(checkout, build_environment):
    code = (
        "import runpy, sys; sys.argv = ['setup.py', '--version']\n"
        "try: import torch\n"
        "except ModuleNotFoundError: runpy.run_path('setup.py', run_name='__main__')\n"
        "print(sys.modules['torch'].__file__)"
    )
    done = run("-c", code, cwd=checkout, PYTHONPATH=build_environment, FORCE_CUDA=0)
    assert done.stdout.splitlines() == [my_cuda_op.__version__, torch.__file__], done.stderr


def test_without_torch_one_sentence_says_what_to_type(checkout, build_environment):
    done = run("setup.py", "--version", cwd=checkout, PYTHONPATH=build_environment, NOTHING_INSTALLED=1)
    assert (done.returncode, done.stdout) == (1, "")
    [sentence] = done.stderr.splitlines()
    assert "type `python -m pip install torch`" in sentence
