"""What every stage is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Run:
    """``dry``: tiny shapes on a CPU, to see that everything goes through."""

    device: torch.device
    dry: bool
    rate: float
    """Bytes a second of a copy, read and written; 0 where that was not measured."""
