"""Lists that everything must know stand in one place: no other module names an entry."""

from __future__ import annotations

import ast
from pathlib import Path

from specdecode_worker.models.arch import ARCHITECTURES

PACKAGE = Path(__file__).parents[2] / "worker/specdecode_worker"
WRITES_A_CHECKPOINT = PACKAGE / "embedded/unpack.py"
"""Makes the folder of the embedded model, whose config.json has the name of its architecture."""


def test_an_architecture_is_named_in_its_module_alone() -> None:
    """Only its own module has the name from config.json, and only the registry imports that module."""
    named: dict[str, set[str]] = {name: set() for name in ARCHITECTURES}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in named and path != WRITES_A_CHECKPOINT:
                named[node.value].add(str(path.relative_to(PACKAGE)))
    assert all(len(paths) == 1 for paths in named.values()), named
    modules = {Path(path).stem for paths in named.values() for path in paths}
    importers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in {f"specdecode_worker.models.{name}" for name in modules}
    }
    assert importers == {"models/arch.py"}


def test_entries_are_found_by_both_names_of_config() -> None:
    """``architectures`` and ``model_type`` are unique, so neither chooses another reader."""
    assert all(name == entry.name for name, entry in ARCHITECTURES.items())
    assert len({entry.model_type for entry in ARCHITECTURES.values()}) == len(ARCHITECTURES)
