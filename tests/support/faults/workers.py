"""Workers of the fault tests: flags of real ones, and those around the fake engine, which are ready within seconds."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from specdecode_worker.contract import Env
from support.processor import FASTEST_DTYPE
from support.worker_process import WorkerProcess, fake, ready, worker_config

SMALL_FLAGS = ("--dtype", "float32", "--max-num-seqs", "4", "--kv-cache-tokens", "4096", "--served-model-name", "small")
EMBEDDED_FLAGS = (
    *("--model", "embedded://smollm2-135m-instruct", "--served-model-name", "smollm2"),
    *("--dtype", FASTEST_DTYPE),
    *("--max-num-seqs", "4", "--kv-cache-tokens", "32768", "--max-num-batched-tokens", "512"),
)
MAX_NUM_SEQS = 156
ADMIN_TOKEN = "token-of-the-tests"
ADMIN_HEADERS = {"Authorization": f"Bearer {ADMIN_TOKEN}"}


def fake_worker(model_folder: Path, log: Path, **server: Any) -> contextlib.AbstractContextManager[WorkerProcess]:
    """Return a ready worker with the fake engine. ``server`` are fields of ServerConfig."""
    config = worker_config(model_folder, server=server, max_num_seqs=MAX_NUM_SEQS)
    return ready(fake(config, log, {Env.admin_token: ADMIN_TOKEN}))
