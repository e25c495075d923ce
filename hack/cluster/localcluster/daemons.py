"""Long-running processes: started detached, known by (pid, start time, boot), ended by pid alone.

A pid file outlives a killed process and even the machine's boot; the kernel's start time of the process and
the boot id tell whether the pid still is ours, so that nothing foreign is ever signalled.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from localcluster.errors import DaemonDied
from localcluster.settings import NODE_NETWORK, SERVICE_NETWORK, Layout

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Identity:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    started_ticks: int
    boot: str


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> Identity | None:
    """Who runs under a pid now; None when nobody does (a zombie is nobody)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    state, started_ticks = fields[0], int(fields[19])
    return None if state in "ZX" else Identity(pid, started_ticks, boot_id())


def running(layout: Layout, name: str) -> Identity | None:
    """The daemon of that name if it still runs; a stale pid file is removed on the way."""
    file = layout.pids / f"{name}.json"
    try:
        recorded = Identity(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        file.unlink()  # cut short by a crash while it was written
        return None
    if recorded.boot == boot_id() and identify(recorded.pid) == recorded:
        return recorded
    file.unlink()
    return None


def start(layout: Layout, name: str, argv: Sequence[object]) -> None:
    """Start a daemon in a session of its own unless it runs; its output goes to the log folder."""
    if running(layout, name):
        return
    layout.pids.mkdir(parents=True, exist_ok=True)
    layout.logs.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PATH": f"{layout.kubernetes}:{layout.buildkit}:{_PATH}"}
    environment.pop("NOTIFY_SOCKET", None)
    outside = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    environment["NO_PROXY"] = ",".join(filter(None, (NODE_NETWORK, SERVICE_NETWORK, outside)))
    with (layout.logs / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [str(word) for word in argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    identity = identify(process.pid)
    if identity is None:
        raise DaemonDied(_obituary(layout, name))
    try:
        (layout.pids / f"{name}.json").write_text(json.dumps(asdict(identity)))
    except BaseException:  # a full disk: nobody would find the process again
        process.kill()
        raise


def check_alive(layout: Layout, *names: str) -> None:
    """Raise with the end of its log when a daemon is gone."""
    for name in names:
        if running(layout, name) is None:
            raise DaemonDied(_obituary(layout, name))


def stop(layout: Layout, name: str, *, grace_s: float = 10) -> None:
    """SIGTERM, then SIGKILL after the grace period; nothing to do when it does not run."""
    identity = running(layout, name)
    if identity is not None:
        end([identity], grace_s=grace_s)
    (layout.pids / f"{name}.json").unlink(missing_ok=True)


def end(identities: Sequence[Identity], *, grace_s: float) -> None:
    """End exactly these processes and wait until they are gone. Without a grace period there is no SIGTERM."""
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        if not patience_s:
            continue
        left = [one for one in identities if identify(one.pid) == one]
        for one in left:
            _signal(one.pid, number)
        deadline = time.monotonic() + patience_s
        while any(identify(one.pid) == one for one in left) and time.monotonic() < deadline:
            time.sleep(0.05)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may go between the look and the signal
        os.kill(pid, number)


def log_lines(layout: Layout, name: str) -> list[str]:
    """Return what a daemon has logged, in all of its runs."""
    log = layout.logs / f"{name}.log"
    return log.read_text(errors="replace").splitlines() if log.exists() else []


def _obituary(layout: Layout, name: str) -> str:
    log, lines = layout.logs / f"{name}.log", log_lines(layout, name)
    tail = "\n".join("    " + line[:300] for line in lines[-8:])
    return f"{name} ended by itself; the end of {log}:\n{tail}\nFix that, then run hack/cluster/up again."
