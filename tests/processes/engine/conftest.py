"""Fixtures of the tests of ranks: folders of a small model, and an engine of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.factory import load_engine
from support.worker.small_folders import exact_config_of, write_head, write_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of a target and of a head for it."""
    folder = tmp_path_factory.mktemp("models")
    return write_target(folder / "target"), write_head(folder / "head")


@pytest.fixture(scope="module")
def whole(folders: tuple[Path, Path]) -> Engine:
    """Return an engine of one rank without graphs."""
    return load_engine(exact_config_of(*folders, 1), Path)
