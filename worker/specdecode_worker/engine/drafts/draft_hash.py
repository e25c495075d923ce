"""Hash of a draft, which identifies it in plans and reports.

Server and engine compute it with the same function: the server before the draft is loaded, the engine afterwards. The
server process imports this module, so it must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from specdecode_worker.contract import DraftConfig
from specdecode_worker.models.checkpoints.model_hash import model_hash


def draft_hash(config: DraftConfig, resolve: Callable[[str], Path]) -> str:
    """Return the hash of the draft of ``config``, read from its files. Its quantization does not change the hash.

    Args:
        config: Configuration of the draft.
        resolve: Function that maps a model URI to a local folder.

    Raises:
        ModelError: The URI names no model.
        OSError: A file cannot be read.
    """
    if config.method == "suffix":
        return "suffix"
    if config.uri is None:
        return f"ngram-{config.prompt_lookup_min}-{config.prompt_lookup_max}"
    return model_hash(resolve(config.uri), with_tokenizer=config.method == "draft-model")
