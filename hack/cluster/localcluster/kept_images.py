"""The node's images and BuildKit's cache, which outlive the cluster: building them takes minutes, moving them none.

They are kept beside the state folder, under a key of the requirement files, which decide about the large layers. Images
of other requirement files are removed when a cluster boots.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from localcluster.console import say
from localcluster.settings import BUILDKIT_VERSION, DEBIAN_SUITE, REPOSITORY, Layout
from localcluster.shell import run

_REQUIREMENTS = ("build", "worker", "operator", "embedded")
_KEPT = (Path("containerd/root"), Path("buildkit"))
"""Folders below the state folder."""
_PODS = Path("containerd/root/io.containerd.grpc.v1.cri")
"""Files of the pods that ran. Their containers are deleted before."""


def key() -> str:
    """Return the key of the images that this tree builds."""
    texts = [(REPOSITORY / "requirements" / f"{name}.txt").read_bytes() for name in _REQUIREMENTS]
    return hashlib.sha256(b"\0".join([*texts, BUILDKIT_VERSION.encode(), DEBIAN_SUITE.encode()])).hexdigest()[:16]


def keep(layout: Layout) -> None:
    """Move images and cache out of the state folder, which is about to be removed. Nothing may run on them."""
    folder = layout.kept_images / key()
    shutil.rmtree(layout.state / _PODS, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    for part in _KEPT:
        if (layout.state / part).exists():
            (folder / part).parent.mkdir(parents=True, exist_ok=True)
            (layout.state / part).rename(folder / part)
    if folder.exists():
        size = run(["du", "--summarize", "--block-size=1G", folder]).split()[0]
        say(f"==> Images stay for the next boot ({size} GB in {folder}); hack/cluster/down --purge removes them")


def restore(layout: Layout) -> None:
    """Move kept images back into the state folder unless it has some; remove those of other requirement files."""
    folder = layout.kept_images / key()
    if folder.exists():
        for part in _KEPT:
            if (folder / part).exists() and not (layout.state / part).exists():
                (layout.state / part).parent.mkdir(parents=True, exist_ok=True)
                (folder / part).rename(layout.state / part)
    purge(layout)


def purge(layout: Layout) -> None:
    """Remove what is kept."""
    if layout.kept_images.exists():
        run(["rm", "-rf", "--one-file-system", layout.kept_images])
