"""Everything that the next training step depends on, in one file that is always whole."""

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
    step: int = 0
    epoch: int = 0
    batch: int = 0  # of the epoch
    shards: int = 0  # in use in this epoch
    seconds: float = 0.0
    tokens: int = 0
    most: float = 0.0  # tokens per step of the best validation
    worse: int = 0  # validations since then
    history: list[dict[str, Any]] = field(default_factory=list)


def write(state: dict[str, Any], folder: Path) -> None:
    """Writes ``folder``/checkpoint.pt by one rename."""
    partial = folder / "checkpoint.partial"
    torch.save(state, partial)
    os.rename(partial, folder / "checkpoint.pt")


def read(folder: Path, settings: TrainSettings) -> dict[str, Any] | None:
    """The checkpoint in ``folder``, None if there is none. Raises ResumeMismatch if other settings made it."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True)
    changed = [name for name, value in asdict(settings).items() if state["settings"].get(name) != value]
    if changed:
        raise ResumeMismatch(
            f"{path} was made with other settings ({', '.join(changed)}); name another --out or repeat those"
        )
    return state
