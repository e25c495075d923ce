"""Hash of the files of a draft, and its calibration file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specdecode_worker.contract import DraftConfig
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.fetch import CALIBRATION_FILE, model_hash

# Hash of a draft, which identifies it in plans and reports.
#
# Server and engine compute it with the same function: the server before the draft is loaded, the engine afterwards. The
# server process imports this module, so it must not import torch.


def draft_hash(config: DraftConfig, resolve: Callable[[str], Path]) -> str:
    """Return the hash of the draft of ``config``, read from its files. Its quantization does not change the hash.

    Args:
        config: Configuration of the draft.
        resolve: Function that maps a model URI to a local folder.

    Raises:
        ModelError: The URI names no model.
        OSError: A file cannot be read.
    """
    if config.method == "ngram":
        return f"ngram-{config.prompt_lookup_min}-{config.prompt_lookup_max}"
    if config.uri is None:
        return config.method
    return model_hash(resolve(config.uri), with_tokenizer=config.method == "draft-model")


# Reader of ``calibration.json``, which the evaluation of a draft writes next to its weights.

_MAX_BYTES = 2**20
"""Bound of the file. The evaluation writes some kilobytes."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Figures of the evaluation by depth, from depth 1 on; empty if there are none."""

    sharpness: tuple[float, ...] = ()
    """Factors on the draft's logits."""
    agreement: tuple[float, ...] = ()
    """Share of the drafted tokens that were the target's, given that those before were."""


def read_calibration(folder: Path) -> Calibration:
    """Read ``calibration.json`` in the folder of the weights. The file may be absent.

    Raises:
        ModelError: The file cannot be read or is malformed.
    """
    path = folder / CALIBRATION_FILE
    if not os.path.lexists(path):  # a link to a missing file is an error
        return Calibration()
    try:
        document = _read(path)
        sharpness = tuple(float(factor) for factor in document["sharpness"])
        agreement = tuple(float(share) for share in document.get("agreement", ()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise _malformed(path, str(reason)) from None
    if not all(math.isfinite(factor) and factor > 0 for factor in sharpness):
        raise _malformed(path, "a factor is not a finite number above 0")
    if not all(0 <= share <= 1 for share in agreement):
        raise _malformed(path, "an agreement is not between 0 and 1")
    return Calibration(sharpness, agreement)


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
