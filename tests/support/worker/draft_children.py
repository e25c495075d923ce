"""Functions that draft processes of tests run: a spawned process must be able to import them."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

from specdecode_worker.drafts.own_device_process import DraftServer, TensorRegion, TensorShape


def refuse() -> DraftServer:
    """Load no draft: a `BuildDraft` whose file is gone."""
    raise FileNotFoundError(2, "No such file or directory", "/models/head/config.json")


def die() -> DraftServer:
    """End the process while it loads, as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def double(region: TensorRegion, pipe: Connection) -> None:
    """Double the tensors that the other process has put, in place."""
    for view in region.get([TensorShape("int64", (3,)), TensorShape("bfloat16", (2, 2))]):
        view *= 2
    pipe.send(True)
