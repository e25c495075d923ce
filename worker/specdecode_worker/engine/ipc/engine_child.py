"""Start and end of the engine process, as seen from the server process."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from specdecode_worker.bound_process import BoundProcess
from specdecode_worker.contract import Plan, SyntheticKnobs, WorkerConfig
from specdecode_worker.engine.ipc import engine_process
from specdecode_worker.engine.ipc.engine_interface import Build
from specdecode_worker.engine.ipc.heartbeat import Heartbeat, HeartbeatBlock
from specdecode_worker.engine.ipc.stack_dump import request_stacks

_REAP_SECONDS = 2.0
_KILL_SECONDS = 0.5
"""Time for a killed process to disappear. One that waits for its device in the kernel may not."""


class EngineChild:
    """The engine process with its private folder and its heartbeat. Created and used on the event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        plan: Plan | None,
        knobs: SyntheticKnobs | None,
        build: Build | None,
        on_end: Callable[[], None],
    ) -> None:
        """Prepare the process. ``on_end`` is called after it has ended, unless `remove` comes first."""
        self._folder = Path(tempfile.mkdtemp(prefix="specdecode-"))  # mode 0700: other users cannot connect
        self._block = HeartbeatBlock()
        self.address = f"ipc://{self._folder}/engine"
        written = [one and one.model_dump_json() for one in (plan, knobs)]
        self._process = BoundProcess(
            target=engine_process.main,
            args=(self.address, config.model_dump_json(), *written, build, self._block, str(self._stacks)),
            name="specdecode-engine",
        )
        self._gone = asyncio.Event()
        self._on_end = on_end

    def start(self) -> None:
        """Start the process."""
        self._process.start()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._sentinel_ready)

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def heartbeat(self) -> Heartbeat:
        """The last heartbeat, also of a process that is stopped or gone."""
        return self._block.read()

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        # The sentinel of an ending process is ready a little before the kernel has its exit code.
        self._process.join(_REAP_SECONDS if self._gone.is_set() else 0)
        return self._process.exitcode

    async def stacks(self) -> str:
        """Return the stacks of the threads of the process, or why there are none."""
        return await request_stacks(self.pid, self._stacks)

    def kill(self) -> None:
        """Kill the process, with which its children end, without waiting."""
        self._process.kill()

    async def wait(self, seconds: float) -> bool:
        """Wait until the process has ended, and return whether it has."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), seconds)
        return self._gone.is_set()

    async def remove(self) -> None:
        """Kill the process if it runs, wait for a short time, and delete its folder. ``on_end`` is not called."""
        self._on_end = lambda: None
        if not self._gone.is_set():
            self.kill()
            await self.wait(_KILL_SECONDS)
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _stacks(self) -> Path:
        return self._folder / "stacks"

    def _sentinel_ready(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._gone.set()
        self._on_end()
