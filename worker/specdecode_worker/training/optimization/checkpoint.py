"""The checkpoint file of a training run, written atomically.

It holds everything that the next training step depends on.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdecode_worker.training.errors import ResumeMismatch
from specdecode_worker.training.optimization.schedule import TrainSettings


@dataclass(slots=True)
class Progress:
    """Counters and validation history of a training run, as the checkpoint stores them."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # next batch of the epoch
    shards: int = 0  # number of shards in use in this epoch
    seconds: float = 0.0
    tokens: int = 0
    most: float = 0.0  # best validation so far, tokens per step
    worse: int = 0  # validations since the best one
    history: list[dict[str, Any]] = field(default_factory=list)


def write(state: dict[str, Any], folder: Path) -> None:
    """Write ``state`` to ``folder``/checkpoint.pt through a temporary file and one rename."""
    partial = folder / "checkpoint.partial"
    torch.save(state, partial)
    os.rename(partial, folder / "checkpoint.pt")


def read(folder: Path, settings: TrainSettings) -> dict[str, Any] | None:
    """Return the checkpoint in ``folder``, or None if there is none.

    Raises:
        ResumeMismatch: The checkpoint was made with other settings.
    """
    path = folder / "checkpoint.pt"
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    changed = [name for name, value in asdict(settings).items() if state["settings"].get(name) != value]
    if changed:
        raise ResumeMismatch(
            f"{path} was made with other settings ({', '.join(changed)}); name another --out or repeat those"
        )
    return state
