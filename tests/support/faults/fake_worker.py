"""Workers around the fake engine, ready within seconds, for faults of connections that do not reach an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdecode_worker.contract import Env, WorkerConfig
from support.worker_process import WorkerProcess, fake, worker_config

MAX_NUM_SEQS = 156
ADMIN_TOKEN = "token-of-the-tests"
ADMIN_HEADERS = {"Authorization": f"Bearer {ADMIN_TOKEN}"}


@contextlib.contextmanager
def fake_worker(model_folder: Path, log: Path, **server: Any) -> Iterator[WorkerProcess]:
    """Yield a ready worker with the fake engine. ``server`` are fields of ServerConfig."""
    config = worker_config(model_folder, max_num_seqs=MAX_NUM_SEQS).model_dump()
    config["server"] |= {"host": "127.0.0.1", "port": 0, "admin_port": 0, **server}
    config_json = WorkerConfig.model_validate(config).model_dump_json()
    with fake(config_json, log, {Env.admin_token: ADMIN_TOKEN}) as worker:
        worker.wait_ready()
        yield worker
