"""Router's client of the API server, direct and through a TCP proxy that can fail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_router.discovery.api_server import ApiServer


@pytest.fixture
async def direct(kubeconfig: dict[str, Any], tmp_path: Path) -> AsyncIterator[ApiServer]:
    path = tmp_path / "direct"
    path.write_text(yaml.safe_dump(kubeconfig))
    api = await ApiServer.connect(str(path))
    yield api
    await api.close()


@pytest.fixture
async def proxied(proxied_kubeconfig: Path) -> AsyncIterator[ApiServer]:
    api = await ApiServer.connect(str(proxied_kubeconfig))
    yield api
    await api.close()
