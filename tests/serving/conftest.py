"""Fixtures for the server around a real engine process, with and without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from specdecode_worker.server.admission import ReloadedSecrets, Scope
from specdecode_worker.server.listening import GracefulShutdown
from specdecode_worker.server.routes.admin import admin_app
from specdecode_worker.server.routes.public import public_app
from specdecode_worker.server.service import Service
from support import small_model
from support.worker.services import client_of, over_fake_engine

TOKEN = "token-of-the-tests"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    small_model.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of a small random target and of a draft for it."""
    return small_model.write_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture
async def service(model_folder: Path) -> AsyncIterator[Service]:
    async with over_fake_engine(model_folder) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting_service(model_folder: Path) -> AsyncIterator[Service]:
    """Yield a service with one engine for all tests of a module.

    Those tests are marked with ``asyncio(loop_scope="module")``.
    """
    async with over_fake_engine(model_folder) as made:
        yield made


@pytest.fixture
async def client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(public_app(service)) as made:
        yield made


@pytest.fixture
async def shutdown(service: Service) -> GracefulShutdown:
    return GracefulShutdown(service.lifecycle, service.config.server, lambda: service.engine.in_flight, asyncio.Event())


@pytest.fixture
async def admin(service: Service, shutdown: GracefulShutdown) -> AsyncIterator[httpx.AsyncClient]:
    tokens = ReloadedSecrets("admin tokens", {Scope.operator: TOKEN})
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with client_of(admin_app(service, shutdown, tokens), "http://127.0.0.1:8001", headers=headers) as made:
        yield made
