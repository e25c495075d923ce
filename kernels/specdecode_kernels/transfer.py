"""The host's numbers on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of numbers, or of rows of them, that nobody waits for: from memory that a device cannot copy from by
    itself, a copy would wait for all that is queued. ``dtype`` None is torch's own for such numbers; whoever may pass
    none at all names one."""
    held = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return held.to(device, non_blocking=True)
