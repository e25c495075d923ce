"""Workers around the fake engine, ready within seconds, for faults of connections that do not reach an engine."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from specdecode_worker.contract import Env
from support.worker_process import WorkerProcess, fake, ready, worker_config

MAX_NUM_SEQS = 156
ADMIN_TOKEN = "token-of-the-tests"
ADMIN_HEADERS = {"Authorization": f"Bearer {ADMIN_TOKEN}"}


def fake_worker(model_folder: Path, log: Path, **server: Any) -> contextlib.AbstractContextManager[WorkerProcess]:
    """Return a ready worker with the fake engine. ``server`` are fields of ServerConfig."""
    config = worker_config(model_folder, server=server, max_num_seqs=MAX_NUM_SEQS)
    return ready(fake(config, log, {Env.admin_token: ADMIN_TOKEN}))
