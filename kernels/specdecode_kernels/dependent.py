"""Programmatic dependent launch: a kernel starts while the one before it runs, and waits before it reads results.

Between two launches of a graph the memory is idle for two to four microseconds, while one kernel ends and the next
begins. On GPUs of compute capability 9.0 to 11, a kernel launched with `options` is on its multiprocessors by then.

Every program of a kernel that is launched so calls `wait` before it reads anything but weights, and before it writes.
`wait` returns when all earlier kernels have ended, since each of them waited itself. Once all programs of a kernel
called `release` or ended, the next kernel may start. A large kernel does so at its end: programs of the next one would
take the places of its own.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdecode_kernels import dispatch

ENABLED = True
"""False launches every kernel when the one before it has ended."""


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Wait for the kernels before."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def release(DEPENDENT: tl.constexpr):
    """Let the next kernel start."""
    if DEPENDENT:
        gdc_launch_dependents()


def options(x: Tensor) -> dict[str, Any]:
    """Return arguments of a launch on the device of ``x``: the constant of `wait`, and the launch option."""
    if not ENABLED or not is_supported(x):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


def is_supported(x: Tensor) -> bool:
    """Return whether kernels can start early where the tensor is; False without a GPU, as for the interpreter."""
    return x.is_cuda and dispatch.is_hopper(x)
