"""Hash of a model's files. The server process imports this module, so it must not import torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

CALIBRATION_FILE = "calibration.json"


def model_hash(folder: Path, *, with_tokenizer: bool = False) -> str:
    """Return the hash (16 hex digits) of config.json, every safetensors file and, if there is one, calibration.json.

    It identifies a target or a draft in plans and reports. A draft's calibration is part of it, because two drafts with
    the same weights and other calibrations propose other tokens. ``with_tokenizer`` adds tokenizer.json for the same
    reason: it decides which tokens a draft model proposes. Raises OSError if a file cannot be read.
    """
    digest = hashlib.sha256()
    paths = [folder / "config.json", *folder.glob("*.safetensors"), *folder.glob(CALIBRATION_FILE)]
    if with_tokenizer:
        paths += folder.glob("tokenizer.json")
    for path in sorted(paths):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
