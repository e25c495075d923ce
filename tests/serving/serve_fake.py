"""``serve`` with the fake engine: the real server process, started within a second. Config as JSON in argv[1]."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # makes `small_model` importable

import fake_engine
import uvloop

from specdecode_worker.contract import WorkerConfig
from specdecode_worker.server.errors import CannotStart
from specdecode_worker.server.server_process import serve

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            sys.exit(runner.run(serve(WorkerConfig.model_validate_json(sys.argv[1]), build=fake_engine.build)))
    except CannotStart as error:
        sys.exit(f"cannot start: {error}")
