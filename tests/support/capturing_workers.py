"""Workers with the fake engine that capture traffic, on a chosen loopback address and admin port."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdecode_worker.capture.segments import segment_name
from specdecode_worker.contract import CaptureConfig
from support.worker_process import WorkerProcess, fake, worker_config

MAX_AGE_SECONDS = 86400.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def capturing(
    model_folder: Path, tokens: Path, address: str, admin_port: int, folder: Path, **server: Any
) -> Iterator[WorkerProcess]:
    changed = {"host": address, "admin_port": admin_port, "admin_tokens_path": str(tokens), **server}
    capture = CaptureConfig(dir=str(folder), max_age_seconds=MAX_AGE_SECONDS)
    config = worker_config(model_folder, server=changed).model_copy(update={"capture": capture})
    # A recorder that opens its folder deletes segments that nobody can read. Until then it would delete those of tests.
    unreadable = folder / segment_name(time.time())
    folder.mkdir(mode=0o700)
    unreadable.touch()
    with fake(config, folder.with_suffix(".log")) as worker:
        worker.wait_until(lambda: not unreadable.exists() and _accepts(address, admin_port), 60)
        yield worker


def _accepts(address: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((address, port), 1).close()
        return True
    return False
