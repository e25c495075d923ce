"""Python processes that end with the process that started them, whatever either of them is doing.

multiprocessing gives every spawned process the reading end of a pipe, whose other end only its parent holds. The child
asks the kernel to kill it once that end is closed. This needs no thread and no lock of the child, so it also ends one
that hangs in a driver, is stopped, or loads a model; only the import of its modules comes before.

PR_SET_PDEATHSIG would end a child with the thread that started it, and drafts are started by threads that end before.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import signal
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from typing import Any


class BoundProcess(SpawnProcess):
    """Spawned process that ends with its parent, and is killed when the interpreter of its parent exits.

    It may have children of its own. It ignores SIGINT and SIGTERM, which can reach a whole process group: its parent
    ends it in order. CUDA cannot be used after a fork, and the server has threads, so it is spawned.
    """

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> None:
        """Prepare the process; ``start`` starts it. ``target`` and ``args`` must be picklable."""
        super().__init__(target=target, args=args, name=name)

    def start(self) -> None:
        """Start the process."""
        super().start()
        # The exit of an interpreter waits for all children, before the pipes to them are closed.
        Finalize(self, self._popen.kill, exitpriority=0)  # type: ignore[attr-defined]

    def run(self) -> None:
        """Run the target in the new process."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        parent = multiprocessing.parent_process()
        assert parent is not None
        end_with(parent.sentinel)
        super().run()


def end_with(pipe: int) -> None:
    """Have the kernel kill this process when the last writing end of a pipe is closed, also if it is closed already.

    Args:
        pipe: Descriptor of the reading end. Nothing may be written to it from now on.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:
        os._exit(1)
