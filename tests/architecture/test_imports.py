"""Import rules of the packages, checked in separate processes and by import-linter's contracts."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_operator_imports_without_anything_of_the_worker_image() -> None:
    done = python(
        """
        import importlib, pkgutil, sys
        heavy = ("torch", "safetensors", "tokenizers", "fastapi", "uvicorn", "zmq", "triton")
        sys.modules.update(dict.fromkeys(heavy))  # an import of None fails
        import specdecode_operator
        for module in pkgutil.walk_packages(specdecode_operator.__path__, "specdecode_operator."):
            importlib.import_module(module.name)
        """
    )
    assert done.returncode == 0, done.stderr


def test_the_contract_needs_pydantic_alone() -> None:
    done = python(
        """
        import sys, specdecode_worker.contract
        loaded = {name.split(".")[0] for name in sys.modules}
        assert not loaded & {"torch", "numpy", "fastapi", "kubernetes", "kopf", "httpx"}, loaded
        """
    )
    assert done.returncode == 0, done.stderr


def test_no_folder_has_an_init_that_would_shadow_a_package() -> None:
    """A package named operator would shadow the standard library's module of that name."""
    found = [path for path in (ROOT / "tests").rglob("__init__.py") if "support" not in path.parts]
    found += [ROOT / name / "__init__.py" for name in ("operator", "router", "worker", "kernels", "simulator")]
    assert [path for path in found if path.exists()] == []


def test_images_do_not_contain_the_simulator() -> None:
    """Both images install the wheel of the root project, built from the files that their ignore files admit."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {Path(package).name for package in packages} == {
        "specdecode_operator",
        "specdecode_router",
        "specdecode_worker",
        "specdecode_kernels",
    }
    for name in (".dockerignore", "operator/Dockerfile.dockerignore"):
        lines = (ROOT / name).read_text().splitlines()
        assert "*" in lines, name
        assert not any("simulator" in line for line in lines if line.startswith("!")), name


PACKAGES = (
    "specdecode_kernels",
    "specdecode_operator",
    "specdecode_router",
    "specdecode_simulator",
    "specdecode_worker",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_through_others(package: str) -> None:
    """A CycleError names the modules of a circle, to which imports for types and inside functions belong too."""
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 20
    TopologicalSorter(imports).prepare()
