"""Folders that downloads go to: what they hold, their room, and errors of a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from specdecode_worker.contract import Env
from specdecode_worker.models.errors import DiskFull

MANIFEST = "specdecode-manifest.json"
"""File that a download writes last. It exists only if every file is present and passed its hash check."""
CONFIGS = ("config.json", "adapter_config.json")
"""Files of which the folder of a model, or of an adapter, has one."""
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_SPARE_BYTES = 64 << 20
"""Disk space to leave free, so that a full cache does not break the node."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """Repository on a hub, at a branch, tag or commit."""

    org: str
    name: str
    revision: str

    @property
    def id(self) -> str:
        """Name of the repository, org/name."""
        return f"{self.org}/{self.name}"

    @property
    def uri(self) -> str:
        """The hf:// URI with the revision."""
        return f"hf://{self.id}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit. A branch or a tag may move."""
        return _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> HubModel:
        """Return the model at a commit."""
        return replace(self, revision=commit)

    def folder(self, cache_dir: Path) -> Path:
        """Return the folder of this model in the cache."""
        return cache_dir / "hf" / self.org / self.name / self.revision.replace("/", "--")


def places_of(cache: Path) -> tuple[Path, Path]:
    """Return the folders that may hold models: the cache, and one for where it cannot be written, as in a container."""
    return cache, Path(tempfile.gettempdir()) / "specdecode-models"


def writable_place(cache: Path) -> Path:
    """Return the first of `places_of` that models can be written to. It is created if need be."""
    first, other = places_of(cache)
    try:
        first.mkdir(parents=True, exist_ok=True)
    except OSError:
        return other
    return first if os.access(first, os.W_OK) else other


def check_room(folder: Path, missing_bytes: int) -> None:
    """Raise DiskFull if the disk of ``folder``, or the model cache of a pod, has no room for ``missing_bytes`` more."""
    limit, _, cache = os.environ.get(Env.cache_limit, "").partition(" ")
    if cache and folder.is_relative_to(cache):
        most, used = int(limit), sum(path.lstat().st_blocks * 512 for path in Path(cache).rglob("*") if path.is_file())
        if used + missing_bytes + _SPARE_BYTES > most:
            raise DiskFull(
                f"{folder} needs {missing_bytes / 1e9:.1f} GB more, and the model cache holds {used / 1e9:.1f} GB of "
                f"{most / 1e9:.1f} GB: set spec.modelCache to a claim or to an emptyDir with a larger sizeLimit, or "
                "the chart's worker.modelCache for all deployments"
            )
    free = shutil.disk_usage(folder).free
    if missing_bytes + _SPARE_BYTES > free:
        raise DiskFull(f"{folder} needs {missing_bytes / 1e9:.1f} GB more, the disk has {free / 1e9:.1f} GB free")


@contextlib.contextmanager
def disk_full_errors(folder: Path) -> Iterator[None]:
    """Turn the system's errors of a full disk into DiskFull."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(f"the disk of {folder} is full; free some room and pull again, it goes on from here") from None
