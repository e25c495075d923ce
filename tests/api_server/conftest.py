"""Makes the support of the operator's unit tests importable for tests against a real API server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[1] / "unit"
sys.path.insert(0, str(UNIT / "operator" / "support"))
sys.path.insert(0, str(UNIT / "operator" / "kube" / "support"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder as one that needs a cluster."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("cluster")
