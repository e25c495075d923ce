"""A service in this process, over an engine process with the fake engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp

from specdecode_worker.capture import Recorder
from specdecode_worker.contract import Plan, TaskMatch
from specdecode_worker.engine.client import EngineClient
from specdecode_worker.server.admission import Model
from specdecode_worker.server.listening import Lifecycle
from specdecode_worker.server.service import Service
from specdecode_worker.server.tools import Tokenizer
from support.worker import fake_engine
from support.worker_process import worker_config

PLAN = Plan(uid="uid-1", draft="d", version=3, tasks=(TaskMatch(name="code", match="def "), TaskMatch(name="chat")))


def client_of(app: ASGIApp, url: str = "http://worker", **fields: Any) -> httpx.AsyncClient:
    """Return a client of an application in this process; ``fields`` are those of httpx.AsyncClient."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=url, **fields)


@contextlib.asynccontextmanager
async def over_fake_engine(
    model_folder: Path, plan: Plan = PLAN, recorder: Recorder | None = None
) -> AsyncIterator[Service]:
    """Yield a service over a process with the fake engine, once it is loaded."""
    config = worker_config(model_folder)
    engine = EngineClient(config, plan, build=fake_engine.build)
    made = Service(config, engine, Lifecycle(), plan, recorder)
    try:
        made.model_loaded(Model(Tokenizer.from_folder(model_folder), await engine.loaded))
        yield made
    finally:
        made.close()
        await engine.close()
