"""Container images from a folder or a tar of files, as a docker archive with one layer; no daemon needed."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Names of images by those of the kernel."""
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def from_program(program: Path, image: str, out: Path) -> None:
    """An image that holds one static program and runs it, as nobody special."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(program, program.name, filter=_anonymous)
    layer_file = out.with_suffix(".layer")
    layer_file.write_bytes(layer.getvalue())
    try:
        from_layer(layer_file, image, out, entrypoint=[f"/{program.name}"], user="65532:65532")
    finally:
        layer_file.unlink()


def from_layer(layer: Path, image: str, out: Path, *, entrypoint: Sequence[str] = (), user: str = "") -> None:
    """Wrap an uncompressed tar of a root file system; the archive appears whole or not at all."""
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    config = {"Env": [_PATH], "User": user, "WorkingDir": "/"}
    config |= {"Entrypoint": list(entrypoint)} if entrypoint else {"Cmd": ["bash"]}
    document = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [image], "Layers": ["layer.tar"]}]
    scratch = out.with_suffix(".new")
    with tarfile.open(scratch, "w") as tar:
        _add_json(tar, "config.json", document)
        _add_json(tar, "manifest.json", manifest)
        _add_file(tar, "layer.tar", layer)
    shutil.move(scratch, out)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """The same bytes give the same image, whoever built them and when."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry


def _add_json(tar: tarfile.TarFile, name: str, document: object) -> None:
    data = json.dumps(document).encode()
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def _add_file(tar: tarfile.TarFile, name: str, source: Path) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = source.stat().st_size
    with source.open("rb") as file:
        tar.addfile(entry, file)
