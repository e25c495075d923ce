"""Tests that `make gpu` needs no more packages than docs/dev/testing.md names.

A machine with a GPU may have no others.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
ON_THE_MACHINE = {"torch", "triton", "tokenizers", "safetensors", "numpy"}
CARRIED = set(re.findall(r"packages=\((.*?)\)", (ROOT / "hack" / "gpu-carry").read_text(), re.DOTALL)[0].split())
COLLECT = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *{arguments!r}]))
"""


def absent_modules(present: set[str]) -> set[str]:
    """Return the installed modules that neither ``present`` nor anything that it requires brings."""
    known, todo = set[str](), [canonicalize_name(name) for name in present]
    while todo:
        name = todo.pop()
        if name not in known:
            known.add(name)
            todo += requirements(name)
    owners = packages_distributions()
    return {
        module
        for module, names in owners.items()
        if not known.intersection(map(canonicalize_name, names)) and not module.startswith("_")
    }


def requirements(name: str) -> list[str]:
    try:
        lines = requires(name) or []
    except PackageNotFoundError:
        return []
    needed = (Requirement(line) for line in lines)
    return [canonicalize_name(one.name) for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]


def collected(absent: set[str], folder: Path) -> subprocess.CompletedProcess[str]:
    settings = folder / "pytest.ini"
    settings.write_text("[pytest]\n")
    code = COLLECT.format(absent=absent, arguments=["-c", str(settings), "--rootdir", str(ROOT), "tests/gpu"])
    paths = os.pathsep.join(str(ROOT / part) for part in ("worker", "kernels"))
    environment = dict(os.environ, PYTHONPATH=paths, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", TRITON_INTERPRET="0")
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )


def test_gpu_tests_import_what_the_machine_has(tmp_path: Path) -> None:
    absent = absent_modules(ON_THE_MACHINE | CARRIED) - {"specdecode_worker", "specdecode_kernels"}
    assert {"httpx", "kubernetes", "fastapi", "transformers"} <= absent
    done = collected(absent, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("package", ["msgspec", "tokenizers"])
def test_missing_package_is_noticed(package: str, tmp_path: Path) -> None:
    """Self-check: collection fails where a package that the engine imports is absent."""
    done = collected(absent_modules(ON_THE_MACHINE | CARRIED) | {package}, tmp_path)
    assert done.returncode != 0
    assert f"No module named '{package}" in done.stdout + done.stderr
