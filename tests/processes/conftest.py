"""Tests that start processes with torch of their own: ranks, drafts on another device, training, benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder as slow."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("slow")
