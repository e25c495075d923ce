"""Which code an operation runs: its Triton kernel for tensors on a GPU, its plain-torch path for all others.

Every op.py asks here, and imports its kernel only then: machines without a GPU need no triton.
"""

from __future__ import annotations

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Whether the kernel serves this tensor. Tests answer yes for all, and run kernels through the interpreter."""
    return x.is_cuda


def learns(*tensors: Tensor) -> bool:
    """Whether gradients will be asked for, which kernels have none of."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def processors(x: Tensor) -> int:
    """Streaming multiprocessors of the tensor's GPU, by which grids are sized; an H100's where there is none."""
    if not x.is_cuda:
        return 132
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)
