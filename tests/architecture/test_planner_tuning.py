"""Constants of the planner: all are in tuning.py, and each says what it is."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from specdecode_operator.planning.tuning import Tuning

PLANNING = Path(__file__).parents[2] / "operator" / "specdecode_operator" / "planning"
MODULES = sorted(PLANNING.glob("*.py"))
PLAIN = {0, 1, 2, 0.5, 100, 1000}
"""Numbers that are no tuning: identities, squares, halves, percent and milliseconds."""


@pytest.mark.parametrize(
    "module", [module for module in MODULES if module.stem != "tuning"], ids=lambda path: path.stem
)
def test_numbers_are_in_tuning(module: Path) -> None:
    constants = (node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Constant))
    numbers = {(node.lineno, node.value) for node in constants if isinstance(node.value, (int, float))}
    assert {(line, value) for line, value in numbers if value not in PLAIN} == set()


def test_every_constant_says_what_it_is() -> None:
    """The text below each constant has its unit or purpose."""
    (tuning,) = (
        node for node in ast.parse((PLANNING / "tuning.py").read_text()).body if isinstance(node, ast.ClassDef)
    )
    body = [node for node in tuning.body[1:] if isinstance(node, (ast.AnnAssign, ast.Expr))]
    kinds = ["constant" if isinstance(node, ast.AnnAssign) else "text" for node in body]
    assert kinds == ["constant", "text"] * len(fields(Tuning))
