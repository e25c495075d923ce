"""Reader of ``calibration.json``, which the evaluation of a draft writes next to its weights."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from specdecode_worker.models.checkpoints.model_hash import CALIBRATION_FILE
from specdecode_worker.models.errors import ModelError

_MAX_BYTES = 2**20
"""Bound of the file. The evaluation writes some kilobytes."""


def read_sharpness(folder: Path) -> tuple[float, ...]:
    """Read the factors on the draft's logits from ``calibration.json`` in the folder of the weights.

    Returns:
        One factor for each depth, from depth 1 on; empty if the file does not exist.

    Raises:
        ModelError: The file cannot be read or is malformed.
    """
    path = folder / CALIBRATION_FILE
    if not os.path.lexists(path):  # a link to a missing file is an error
        return ()
    try:
        factors = _read(path)["sharpness"]
        sharpness = tuple(float(factor) for factor in factors)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise _malformed(path, str(reason)) from None
    if not all(math.isfinite(factor) and factor > 0 for factor in sharpness):
        raise _malformed(path, "a factor is not a finite number above 0")
    return sharpness


def _read(path: Path) -> dict[str, list[float]]:
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    document: dict[str, list[float]] = json.loads(content)
    return document


def _malformed(path: Path, reason: str) -> ModelError:
    return ModelError(
        f'{path} should hold {{"sharpness": [factor of depth 1, ...]}} ({reason}); write it again, or delete it to '
        "draft without calibration"
    )
