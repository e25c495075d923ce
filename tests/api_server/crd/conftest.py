"""Fixtures of the API's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.kind_copy import KindCopy, served_copy
from support.kube import Cluster


@pytest.fixture(scope="session")
def api(cluster: Cluster) -> Iterator[KindCopy]:
    """Yield a copy of the kind that the cluster serves with the schema of this tree."""
    with served_copy(cluster) as copy:
        yield copy
