"""Hash of the files of a draft, and its calibration file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

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


class Calibration(msgspec.Struct, frozen=True):
    """Figures of the evaluation by depth, from depth 1 on; empty if there are none."""

    sharpness: tuple[Annotated[float, msgspec.Meta(gt=0)], ...]
    """Factors on the draft's logits."""
    agreement: tuple[Annotated[float, msgspec.Meta(ge=0, le=1)], ...] = ()
    """Share of the drafted tokens that were the target's, given that those before were."""


def read_calibration(folder: Path) -> Calibration:
    """Read ``calibration.json`` in the folder of the weights. The file may be absent.

    Raises:
        ModelError: The file cannot be read or is malformed.
    """
    path = folder / CALIBRATION_FILE
    if not os.path.lexists(path):  # a link to a missing file is an error
        return Calibration(sharpness=())
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        return msgspec.json.decode(content, type=Calibration)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(
            f'{path} should hold {{"sharpness": [factor of depth 1, ...]}} ({reason}); write it again, or delete it to '
            "draft without calibration"
        ) from None
