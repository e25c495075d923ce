"""Choice of the code path of an operation: Triton kernel for tensors on a GPU, plain PyTorch for all others.

Every op.py calls these functions before it imports its kernel, so machines without a GPU do not need triton.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Return whether the Triton kernel serves this tensor.

    Tests patch this to return True for CPU tensors, to run kernels in Triton's interpreter.
    """
    return x.is_cuda


def learns(*tensors: Tensor) -> bool:
    """Return whether gradients may be needed, which the kernels do not provide."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def processors(x: Tensor) -> int:
    """Return the number of streaming multiprocessors of the tensor's GPU, or 132 (an H100) without a GPU.

    Launchers size their grids by it.
    """
    if not x.is_cuda:
        return 132
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)


def is_hopper(x: Tensor) -> bool:
    """Return whether programs on the tensor's GPU have the shared memory of a Hopper; True without a GPU.

    That is 227 KiB from compute capability 9.0 to 11; GPUs of 12, like those of 8.9, have 99 KiB.
    """
    return not x.is_cuda or (9, 0) <= _capability(x.device) < (12, 0)


def has_fp8(x: Tensor) -> bool:
    """Return whether the tensor's GPU converts fp8 numbers by itself (compute capability 8.9); True without a GPU."""
    return not x.is_cuda or _capability(x.device) >= (8, 9)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
