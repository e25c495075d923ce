"""Fixtures for the tests of hack/cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from localcluster.settings import Layout


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """Return the folder layout of a cluster that never boots."""
    return Layout(state=tmp_path / "state", cache=tmp_path / "cache")
