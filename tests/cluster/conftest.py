"""Fixtures for the tests of hack/cluster. Its Python code becomes importable as `localcluster`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "hack" / "cluster"))

from localcluster.settings import Layout


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """Return the folder layout of a cluster that never boots."""
    return Layout(state=tmp_path / "state", cache=tmp_path / "cache")
