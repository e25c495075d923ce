"""Weights that are published as pickles (``pytorch_model.bin``), converted to safetensors before they are read.

A pickle is a program. It is read once, in a process that can do nothing else (`pickle_child`): what is stored and
loaded are safetensors. Checkpoints in shards have an index and become shards.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from specdecode_worker.files import filled, flush, write_json
from specdecode_worker.models.download_folder import check_room, disk_full_errors
from specdecode_worker.models.errors import NotPresent, WeightMismatch

_PICKLE = re.compile(r"pytorch_(model(?:-\d+-of-\d+)?)\.bin")
_INDEX, _STORED_INDEX = "pytorch_model.bin.index.json", "model.safetensors.index.json"
_CHILD = Path(__file__).with_name("pickle_child.py")
_MEGABYTES_PER_SECOND = 5


def weights_of(names: Iterable[str]) -> list[str]:
    """Return the files of weights to read among those of a folder: safetensors, or pickles if there are none.

    Mistral's consolidated copies, whose tensors have other names, are left out.
    """
    listed = [name for name in names if not name.startswith("consolidated")]
    return [name for name in listed if name.endswith(".safetensors")] or list(filter(_PICKLE.fullmatch, listed))


def convert(source: Path, names: Iterable[str], target: Path) -> list[Path]:
    """Write pickles of the folder ``source`` as safetensors into ``target`` and return them; none without pickles.

    ``names`` are the files that count.

    Raises:
        WeightMismatch: A pickle holds more than tensors, or cannot be read. The message names it.
    """
    pickles = [source / name for name in weights_of(names) if _PICKLE.fullmatch(name)]
    if not pickles:
        return []
    check_room(target, sum(path.stat().st_size for path in pickles))
    for path in pickles:
        _convert_file(path, target / _stored_name(path.name))
    index = source / _INDEX
    if index.is_file():
        try:
            document = json.loads(index.read_bytes())
            document["weight_map"] = {name: _stored_name(file) for name, file in document["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightMismatch(f"{index} is no index of pickled weights: {error}") from None
        write_json(target / _STORED_INDEX, document)
    return pickles


def converted_folder(folder: Path, cache: Path) -> Path:
    """Return a folder like ``folder`` with safetensors: itself, or one in ``cache`` if its weights are pickles.

    Raises:
        WeightMismatch: A pickle is refused.
        NotPresent: The cache cannot be written.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file())
    weights = weights_of(path.name for path in files)
    if not any(map(_PICKLE.fullmatch, weights)):
        return folder
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps([str(folder.resolve()), stats]).encode()).hexdigest()[:16]
    ready = cache / "converted" / key
    try:
        with disk_full_errors(ready):
            return filled(ready, lambda partial: _fill(folder, files, partial))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise NotPresent(
            f"{folder} has pickled weights, and their copy cannot be written: {error}; set --cache-dir, or run pull"
        ) from None


def _fill(folder: Path, files: Sequence[Path], partial: Path) -> None:
    pickles = convert(folder, [path.name for path in files], partial)
    for path in folder.iterdir():
        if path not in pickles and path.name not in (_INDEX, _STORED_INDEX):  # of safetensors that are not there
            (partial / path.name).symlink_to(path.resolve())


def _stored_name(name: str) -> str:
    match = _PICKLE.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no name of pickled weights")
    return f"{match[1]}.safetensors"


def _convert_file(source: Path, target: Path) -> None:
    """Convert one pickle in a process of its own."""
    seconds = 120 + source.stat().st_size / 1e6 / _MEGABYTES_PER_SECOND
    partial = target.with_name(f"{target.name}.partial")
    # Next to the weights, because the container that pulls them can write nowhere else.
    with source.open("rb") as given, partial.open("wb") as out, tempfile.TemporaryFile(dir=target.parent) as errors:
        command = [sys.executable, "-I", str(_CHILD)]
        try:
            code = subprocess.run(command, stdin=given, stdout=out, stderr=errors, env={}, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            code = -1
        errors.seek(0)
        reason = errors.read(2000).decode(errors="replace").strip()
    if code:
        partial.unlink()
        reason = reason.splitlines()[-1] if code > 0 and reason else f"its conversion ended with {code}, at a limit"
        raise WeightMismatch(f"{source} is refused: {reason}; take a checkpoint in safetensors")
    flush(partial)
    os.replace(partial, target)
