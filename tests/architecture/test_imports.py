"""Import rules of the packages, checked in separate processes and by import-linter's contracts."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN_INIT = (
    "operator",
    "router",
    "worker",
    "kernels",
    "simulator",
    "tests",
    "tests/api_server",
    "tests/processes",
    "tests/unit",
    "tests/kernels",
    "tests/e2e",
    "tests/cluster",
)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)


BLOCK = """
    import sys
    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in {names!r}:
                raise ImportError(f"{{name}} is blocked")
    sys.meta_path.insert(0, Blocked())
"""


def blocking(names: set[str], code: str) -> subprocess.CompletedProcess[str]:
    return python(textwrap.dedent(BLOCK.format(names=names)) + textwrap.dedent(code))


def test_blocked_import_fails() -> None:
    done = blocking({"torch"}, "import torch")
    assert done.returncode != 0
    assert "torch is blocked" in done.stderr


@pytest.mark.slow
def test_the_operator_imports_without_anything_of_the_worker_image() -> None:
    heavy = {"torch", "safetensors", "tokenizers", "fastapi", "uvicorn", "zmq", "triton"}
    done = blocking(
        heavy,
        """
        import pkgutil, importlib, specdecode_operator
        for module in pkgutil.walk_packages(specdecode_operator.__path__, "specdecode_operator."):
            importlib.import_module(module.name)
        """,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_plugin_imports_without_the_libraries_of_the_operator() -> None:
    done = blocking({"kopf", "numpy", "prometheus_client", "torch"}, "import specdecode_operator.plugin.commands")
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


def test_the_standard_library_is_not_shadowed() -> None:
    """A package named operator with an __init__.py would shadow the standard library's module of that name."""
    done = subprocess.run(
        [sys.executable, "-c", "import operator, collections; print(operator.__file__)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout


@pytest.mark.parametrize("folder", FORBIDDEN_INIT)
def test_folder_has_no_init_that_would_shadow_a_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


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


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, the first one again at the end; empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def imports_of(package: str) -> dict[str, set[str]]:
    """Return the imports between a package's modules, those for types and inside functions included."""
    graph = grimp.build_graph(package, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_through_others(package: str) -> None:
    imports = imports_of(package)
    assert len(imports) > 20
    assert circle(imports) == []


def test_circles_are_detected() -> None:
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}
    assert circle({"a": {"b"}, "b": {"c"}}) == []
