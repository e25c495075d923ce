"""Lists that everything must know stand in one place: no other module names an entry."""

from __future__ import annotations

import ast
import re
import runpy
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from specdecode_operator.planning.estimates import Tuning
from specdecode_worker.commands.arguments import TRAINED_METHODS
from specdecode_worker.contract import DRAFT_FREE
from specdecode_worker.contract import config as contract
from specdecode_worker.contract.wire import Method
from specdecode_worker.drafts import registry
from specdecode_worker.models.arch import ARCHITECTURES
from specdecode_worker.models.drafts import HEADS
from specdecode_worker.training.heads import NEW_DRAFTS
from support.lossless.small_requests import DRAFTS

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


def test_all_lists_of_drafting_methods_have_the_same_names() -> None:
    methods = set(get_args(Method))
    assert methods == set(contract.METHODS) == {*registry.METHODS, "none"}
    assert methods.difference(DRAFTS) == {"none"}, "the lossless tests run every method"
    assert HEADS.keys() | {"draft-model"} == methods.difference(DRAFT_FREE)
    assert NEW_DRAFTS.keys() == set(TRAINED_METHODS)


def test_every_proof_is_in_the_ledger_and_runs_every_night() -> None:
    root = PACKAGE.parents[1]
    marked = {
        name
        for path in (root / "tests").rglob("*.py")
        if path != Path(__file__).with_name("test_tiers.py")
        for name in re.findall(r'mark\.proof\("([^"]+)"\)', path.read_text())
    }
    sized = set(re.findall(r"\[([a-z-]+)\]=tests", (root / "hack/test").read_text()))
    nightly = re.findall(r"- proofs P=(\S+)", (root / ".github/workflows/nightly.yaml").read_text())
    listed = set(runpy.run_path(str(root / "hack/ledger"))["PROOFS"])
    assert marked | sized == listed == set(nightly), "those of sized are larger by --effort"


# Public class names are unique in the worker: a name in a trace, a review or a search means one thing.


def test_public_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    assert len(places) > 400
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


# Constants of the planner: all are in the class Tuning, and each says what it is.


PLANNING = Path(__file__).parents[2] / "operator" / "specdecode_operator" / "planning"
MODULES = sorted(PLANNING.glob("*.py"))
PLAIN = {0, 1, 2, 0.5, 100, 1000, 3600}
"""Numbers that are no tuning: identities, squares, halves, percent, milliseconds and the hour."""


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_numbers_are_in_tuning(module: Path) -> None:
    body = [node for node in ast.parse(module.read_text()).body if getattr(node, "name", "") != "Tuning"]
    constants = (node for part in body for node in ast.walk(part) if isinstance(node, ast.Constant))
    numbers = {(node.lineno, node.value) for node in constants if isinstance(node.value, (int, float))}
    assert {(line, value) for line, value in numbers if value not in PLAIN} == set()


def test_every_constant_says_what_it_is() -> None:
    """The text below each constant has its unit or purpose."""
    (tuning,) = (
        node
        for node in ast.parse((PLANNING / "estimates.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Tuning"
    )
    body = [node for node in tuning.body[1:] if isinstance(node, (ast.AnnAssign, ast.Expr))]
    kinds = ["constant" if isinstance(node, ast.AnnAssign) else "text" for node in body]
    assert kinds == ["constant", "text"] * len(fields(Tuning))
