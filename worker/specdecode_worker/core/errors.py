"""Errors between the server and the engine process, and the errors of a device that end the process.

EngineGone     the engine process crashed or was killed; it sends no more results
CallRefused    the engine refused a plan, a draft or knobs; the previous ones stay in force
RankLost       a rank of a replica on several devices ended or does not answer
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from specdecode_worker.models.errors import ModelError


class EngineGone(Exception):
    """The engine process crashed or was killed; the message gives the reason."""


class CallRefused(Exception):
    """The engine refused a plan, a draft or synthetic knobs; the previous ones stay in force."""


class RankLost(Exception):
    """A rank of a replica on several devices ended or does not answer; the message gives the reason."""


def crash_reason(error: Exception) -> str:
    """Return the reason of the crash of a process.

    A ModelError or RankLost explains itself; any other error is a bug, so its traceback is logged.
    """
    if isinstance(error, ModelError | RankLost):
        return str(error)
    traceback.print_exc()
    return f"{type(error).__name__}: {error}"


_DEVICE_TEXTS = ("cuda error", "hip error", "triton error", "cublas_status_", "cudnn_status_", "nccl error")
"""Beginnings of the errors of CUDA and its libraries, in lower case."""
_STICKY_TEXTS = (
    "illegal memory access",
    "illegal address",
    "device-side assert",
    "ecc error",
    "nvlink error",
    "unspecified launch failure",
    "launch timed out",
    "illegal instruction",
    "misaligned address",
    "invalid program counter",
    "hardware stack error",
    "context is destroyed",
    "operation not supported on global/shared address space",
)
"""Errors after which every later call of the CUDA runtime fails too, by its documentation of cudaError_t."""
_HARMLESS_TEXTS = (
    "out of memory",
    "alloc_failed",
    "invalid argument",
    "invalid value",
    "invalid configuration argument",
    "invalid device function",
    "no kernel image",
    "too many resources requested",
    "not_supported",
    "not supported",
)
"""Errors of one call, after which the device works on."""


def is_sticky_device_error(error: BaseException) -> bool:
    """Return whether the device of this process cannot be used after ``error`` or one of its causes.

    Only a new process can use the device again. An error of the device that is unknown here counts as sticky: to serve
    on with a broken device is worse than a restart. Lack of memory is not sticky.
    """
    return any(_is_sticky(one) for one in _with_causes(error))


def _is_sticky(error: BaseException) -> bool:
    text = str(error).lower()
    # By name, because the server process imports this module and must not import torch.
    is_accelerator_error = any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__)
    if not is_accelerator_error and not (isinstance(error, RuntimeError) and _contains(text, _DEVICE_TEXTS)):
        return False
    return _contains(text, _STICKY_TEXTS) or not _contains(text, _HARMLESS_TEXTS)


def _contains(text: str, parts: tuple[str, ...]) -> bool:
    return any(part in text for part in parts)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, and the errors that it was raised from or while handling."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            pending += (one.__cause__, one.__context__)
