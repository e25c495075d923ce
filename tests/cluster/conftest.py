"""Makes hack/cluster's Python importable as `localcluster`, as its own command files do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "hack" / "cluster"))

from localcluster.settings import Layout


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """Folders of a cluster that never boots."""
    return Layout(state=tmp_path / "state", cache=tmp_path / "cache")
