"""``serve`` with the fake engine: the real server process, started within a second. Config as JSON in argv[1].

A prompt that starts with BUSY keeps its tokenizer thread busy. Both listeners fail once the file
$PLANTED_LISTENER_FAILURE exists.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from pathlib import Path

import uvicorn
import uvloop

from specdecode_worker.contract import WorkerConfig
from specdecode_worker.http_edge import UnusableFiles
from specdecode_worker.server import server_process
from specdecode_worker.server.errors import CannotStart
from specdecode_worker.server.server_process import serve
from specdecode_worker.server.tools import Tokenizer
from support.worker import fake_engine

BUSY_SECONDS = 60


class SlowTokenizer(Tokenizer):
    """Tokenizer that takes BUSY_SECONDS for a text that starts with BUSY."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if text.startswith("BUSY"):
            time.sleep(BUSY_SECONDS)
        return super().encode(text, add_special_tokens=add_special_tokens)


def plant_listener_failure(trigger: Path) -> None:
    regular = uvicorn.Server.on_tick

    async def on_tick(server: uvicorn.Server, counter: int) -> bool:
        if trigger.exists():
            raise RuntimeError("planted: the listener failed")
        return await regular(server, counter)

    uvicorn.Server.on_tick = on_tick  # type: ignore[method-assign]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    server_process.Tokenizer = SlowTokenizer  # type: ignore[misc]
    if trigger := os.environ.get("PLANTED_LISTENER_FAILURE"):
        plant_listener_failure(Path(trigger))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            sys.exit(runner.run(serve(WorkerConfig.model_validate_json(sys.argv[1]), build=fake_engine.build)))
    except (CannotStart, UnusableFiles) as error:
        sys.exit(f"cannot start: {error}")
