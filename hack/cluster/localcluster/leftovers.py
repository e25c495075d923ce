"""What pods leave behind when their runtime is gone: processes, mounts, network namespaces, cgroups.

Everything is found by a mark that only this cluster has: its containerd's socket in a shim's arguments, its
state folder below a process's root or in a mount point, its CNI network's name in a cached result. Cgroups have
fixed names: those that were there before us are kept.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

from localcluster.daemons import Identity, end, identify
from localcluster.settings import CNI_NETWORK, Layout
from localcluster.shell import run, succeeds

_CGROUPS = Path("/sys/fs/cgroup")
_CNI_CACHE = Path("/var/lib/cni/results")
_NAMESPACE = re.compile(r"/run/netns/(cni-[0-9a-f-]+)")


def clear(layout: Layout, cgroups_before: list[str]) -> None:
    """In the order in which they hold each other: processes, mounts, namespaces, cgroups."""
    end_processes(layout)
    unmount_below(layout.state)
    remove_namespaces(CNI_NETWORK)
    remove_cgroups([tree for tree in pod_cgroups() if tree not in cgroups_before])


def end_processes(layout: Layout) -> None:
    """End the shims and the containers of one node."""
    end(list(_processes(layout)), grace_s=1)


def _processes(layout: Layout) -> Iterator[Identity]:
    """Shims of our containerd, and whatever runs on a root file system of its store."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            ours = _is_shim(layout, entry) or _is_in_container(layout, entry)
        except OSError:
            continue  # it ended while we looked
        identity = identify(int(entry.name)) if ours else None
        if identity is not None:
            yield identity


def _is_shim(layout: Layout, process: Path) -> bool:
    arguments = (process / "cmdline").read_bytes().split(b"\0")
    return b"containerd-shim" in arguments[0] and str(layout.containerd_socket).encode() in arguments


def _is_in_container(layout: Layout, process: Path) -> bool:
    """Its root is an overlay of our store; a shim that was killed takes nobody along, so this finds orphans too."""
    mark = f"upperdir={layout.state}/containerd/"
    mounts = (line.split() for line in (process / "mountinfo").read_text().splitlines())
    return any(fields[4] == "/" and mark in fields[-1] for fields in mounts)


def pod_cgroups() -> list[str]:
    """The kubelet's trees: one a controller with cgroup v1, one in all with v2; BuildKit's beside them."""
    return [tree for name in ("kubepods", "buildkit") for tree in cgroups(name)]


def cgroups(name: str) -> list[str]:
    """Return the cgroups of a name at the top of every hierarchy."""
    return [str(tree) for tree in (*_CGROUPS.glob(f"*/{name}"), _CGROUPS / name) if tree.is_dir()]


def make_cgroups(name: str) -> None:
    """Make a cgroup in every hierarchy. With cgroup v1, one without processors and memory nodes takes no process."""
    unified = (_CGROUPS / "cgroup.procs").exists()
    for hierarchy in [_CGROUPS] if unified else [entry for entry in _CGROUPS.iterdir() if entry.is_dir()]:
        (hierarchy / name).mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):
            if not unified and (hierarchy / setting).exists():
                (hierarchy / name / setting).write_text((hierarchy / setting).read_text())


def unmount_below(folder: Path) -> None:
    """Deepest first; a mount that is still busy is detached."""
    for _ in range(3):
        points = [point for point in mount_points() if Path(point).is_relative_to(folder)]
        for point in sorted(points, key=len, reverse=True):
            if not succeeds(["umount", point]):
                succeeds(["umount", "--lazy", point])
        if not points:
            return


def mount_points() -> list[str]:
    """All of this machine, from the kernel's list, where blanks in a path are octal escapes."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    escaped = [line.split()[4] for line in lines]
    return [re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), point) for point in escaped]


def remove_namespaces(network: str) -> None:
    """CNI writes down, per sandbox and network, which namespace it has set up."""
    for file in _CNI_CACHE.glob(f"{network}-*"):
        for name in set(_NAMESPACE.findall(file.read_text())):
            if Path("/run/netns", name).exists():
                run(["ip", "netns", "delete", name])
        sandbox = file.name.removeprefix(f"{network}-").rpartition("-")[0]
        for cached in _CNI_CACHE.glob(f"*-{sandbox}-*"):  # its loopback's too
            cached.unlink()


def remove_cgroups(trees: list[str]) -> None:
    """A cgroup is removed by rmdir once its last process is reaped, which takes a moment."""
    deadline = time.monotonic() + 5
    for tree in map(Path, trees):
        folders = [folder for folder in tree.rglob("*") if folder.is_dir()]
        for folder in [*sorted(folders, key=lambda path: len(path.parts), reverse=True), tree]:
            while not _rmdir(folder) and time.monotonic() < deadline:
                time.sleep(0.1)


def _rmdir(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def wipe(layout: Layout) -> None:
    """The state folder itself; only after its mounts are gone."""
    run(["rm", "-rf", "--one-file-system", layout.state])  # millions of small files: much faster than shutil


def namespaces() -> list[str]:
    """Names of the machine's named network namespaces."""
    listed = run(["ip", "-j", "netns", "list"]).strip() or "[]"
    return sorted(entry["name"] for entry in json.loads(listed))
