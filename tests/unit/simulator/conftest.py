"""Recordings of the checkout, read once, and small traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdecode_simulator.records.recordings import Library
from specdecode_simulator.records.recordings import library as library_of

RECORDINGS = Path(__file__).parents[3] / "benchmarks" / "recordings"


@pytest.fixture(scope="session")
def recordings() -> Path:
    return RECORDINGS


@pytest.fixture(scope="session")
def library() -> Library:
    return library_of(RECORDINGS)
