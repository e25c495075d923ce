"""Prometheus and promtool: those on PATH, else Debian's package, unpacked into the cache and never installed.

Unpacking needs no rights, starts no service and leaves nothing on the machine but two programs in the cache. Building
them from their module would take longer than everything else together.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from localcluster.console import step
from localcluster.errors import ClusterError, CommandFailed
from localcluster.settings import Layout
from localcluster.shell import run

PROGRAMS = ("prometheus", "promtool")
_DOWNLOAD = ["apt-get", "-o", "APT::Sandbox::User=root", "download", "-q", "prometheus"]


def programs(layout: Layout) -> Path:
    """The folder that has both; got on the first call."""
    found = [shutil.which(name) for name in PROGRAMS]
    if found[0] and found[1] and Path(found[0]).parent == Path(found[1]).parent:
        return Path(found[0]).parent
    cached = sorted(layout.cache.glob("prometheus-[0-9]*"))
    return cached[-1] if cached else _fetched(layout)


def _fetched(layout: Layout) -> Path:
    if shutil.which("apt-get") is None:
        raise ClusterError("put prometheus and promtool on PATH; on Debian they are fetched for you")
    layout.cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".prometheus-", dir=layout.cache))
    try:
        with step("Fetching Debian's Prometheus (20 MB)"):
            _download(scratch)
            (package,) = scratch.glob("prometheus_*.deb")
            run(["dpkg-deb", "--extract", package, scratch / "unpacked"])
        return _kept(scratch, layout.cache / f"prometheus-{package.name.split('_')[1].split('%')[0]}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(folder: Path) -> None:
    """The package lists may never have been read on a fresh machine."""
    try:
        run(_DOWNLOAD, cwd=folder)
    except CommandFailed:
        run(["apt-get", "update", "-q"], hint="Is the Debian mirror reachable?")
        run(_DOWNLOAD, cwd=folder, hint="Is the Debian mirror reachable?")


def _kept(scratch: Path, folder: Path) -> Path:
    """Both programs in one folder that is whole or absent; another fetch may have been faster."""
    whole = scratch / "whole"
    whole.mkdir(mode=0o755)
    for name in PROGRAMS:
        shutil.move(scratch / "unpacked" / "usr" / "bin" / name, whole / name)
    try:
        whole.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    return folder
