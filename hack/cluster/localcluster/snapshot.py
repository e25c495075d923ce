"""What a machine looks like from outside the cluster: taken before `up` and after `down`, the two must agree.

Deliberately knows nothing of what the cluster does: it looks at everything of each kind, so that a new way to
leave something behind is found too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from localcluster import leftovers
from localcluster.daemons import identify
from localcluster.settings import LOCK, Layout
from localcluster.shell import run

Snapshot = dict[str, list[str]]
FILE = LOCK.with_name("specdecode-cluster-before.json")

# These move by themselves: counters of the kernel, and sizes that follow them.
_MOVING_SYSCTLS = re.compile(
    r"^(fs/(dentry-state|file-nr|inode-(nr|state)|aio-nr|quota/|mqueue/)|kernel/(random|ns_last_pid|pty/nr)"
    r"|net/netfilter/nf_conntrack_(count|buckets)|.*/cache_stat$)"
)
_PACKET_COUNTERS = re.compile(r"counter packets \d+ bytes \d+")


def take(layout: Layout) -> Snapshot:
    return {
        "process": sorted(_processes(layout)),
        "mount": sorted(set(leftovers.mount_points())),
        "link": sorted(entry.name for entry in Path("/sys/class/net").iterdir()),
        "route": sorted(run(["ip", "route", "show", "table", "all"]).splitlines()),
        "network namespace": leftovers.namespaces(),
        "packet filter": _packet_filter(),
        "cgroup": sorted(_cgroups()),
        "sysctl": sorted(_sysctls()),
    }


def save(layout: Layout) -> None:
    FILE.write_text(json.dumps(take(layout)))


def differences(layout: Layout) -> list[str]:
    """Everything that is there now and was not, or the other way round, one line each."""
    before: Snapshot = json.loads(FILE.read_text())
    after = take(layout)
    appeared = [f"left behind: {kind} {item}" for kind in after for item in _less(after, before, kind)]
    gone = [f"gone: {kind} {item}" for kind in after for item in _less(before, after, kind)]
    foreign = ("gone: process", "gone: mount", "gone: cgroup")  # others end on their own
    return appeared + [line for line in gone if not line.startswith(foreign)]


def _less(one: Snapshot, other: Snapshot, kind: str) -> list[str]:
    return sorted(set(one[kind]) - set(other[kind]))


def _processes(layout: Layout) -> Iterator[str]:
    """Those that name the cluster's folders in their arguments, or run in a pod's cgroup."""
    marks = (str(layout.state).encode(), str(layout.cache).encode(), b"containerd-shim")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or identify(int(entry.name)) is None:
            continue
        try:
            arguments = (entry / "cmdline").read_bytes()
            cgroups = (entry / "cgroup").read_text()
        except OSError:
            continue  # it ended while we looked
        if any(mark in arguments for mark in marks) or "/kubepods" in cgroups:
            yield arguments.replace(b"\0", b" ").decode(errors="replace").strip()


def _cgroups() -> Iterator[str]:
    """All but those beside our own: whoever gave this process its group gives others to other processes meanwhile."""
    own = {Path(line.split(":", 2)[2]).parent for line in Path("/proc/self/cgroup").read_text().splitlines()}
    beside = tuple(f"{parent}/" for parent in own if parent != Path("/"))
    for folder, _, _ in os.walk("/sys/fs/cgroup"):
        if not any(mark in f"{folder}/" and not folder.endswith(mark[:-1]) for mark in beside):
            yield folder


def _packet_filter() -> list[str]:
    """Every chain and rule with its table, without the counters."""
    lines, table = [], ""
    for line in run(["nft", "list", "ruleset"]).splitlines():
        if line.startswith("table"):
            table = line
        lines.append(f"{table} {_PACKET_COUNTERS.sub('counter', line.strip())}")
    return lines


def _sysctls() -> Iterator[str]:
    """All but what moves. Walked by os.walk, which minds no folder that goes while it looks, as a link's does."""
    for folder, _, names in os.walk("/proc/sys"):
        for path in (Path(folder, name) for name in names):
            name = str(path.relative_to("/proc/sys"))
            if _MOVING_SYSCTLS.match(name):
                continue
            try:
                yield f"{name} = {path.read_text().strip()}"
            except (OSError, UnicodeDecodeError):
                continue  # write-only, or not for us
