"""Hash of a model's files. The server process imports this module, so it must not import torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

CALIBRATION_FILE = "calibration.json"


def model_hash(folder: Path) -> str:
    """Return the hash (16 hex digits) of config.json, every safetensors file and, if there is one, calibration.json.

    It identifies a target or a draft in plans and reports. A draft's calibration is part of it, because two drafts with
    the same weights and other calibrations propose other tokens. Raises OSError if a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob(CALIBRATION_FILE)]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
