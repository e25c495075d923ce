"""Transfer of host values to the device without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of numbers, or of rows of numbers, on ``device`` without waiting for queued work.

    On CUDA the copy starts from pinned memory; a copy from pageable memory would wait for all queued work. ``dtype``
    None uses PyTorch's default for the values; callers that may pass an empty sequence must name a type.
    """
    held = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return held.to(device, non_blocking=True)
