"""Tests of the classification of device errors."""

from __future__ import annotations

import pytest
import torch

from specdecode_worker.core.errors import is_sticky_device_error
from specdecode_worker.models.errors import ModelError


class AcceleratorError(RuntimeError):
    """Stand-in for torch's error, which cannot be raised without a device."""


STICKY = (
    RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously"),
    RuntimeError("CUDA error: operation not supported on global/shared address space"),
    RuntimeError("CUDA error: an error that this list does not know"),
    RuntimeError("Triton Error [CUDA]: misaligned address"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, ...)`"),
    AcceleratorError("CUDA error: the launch timed out and was terminated"),
    AcceleratorError("an illegal memory access was encountered"),
)
NOT_STICKY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("CUDA error: invalid configuration argument"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    ValueError("CUDA error: device-side assert triggered"),
    ModelError("draft.uri has no config.json"),
)


@pytest.mark.parametrize("error", STICKY, ids=str)
def test_errors_that_break_the_device_are_sticky(error: Exception) -> None:
    assert is_sticky_device_error(error)


@pytest.mark.parametrize("error", NOT_STICKY, ids=str)
def test_other_errors_are_not_sticky(error: Exception) -> None:
    assert not is_sticky_device_error(error)


def test_the_cause_of_a_translated_error_counts() -> None:
    translated = ModelError("the draft cannot be loaded")
    translated.__cause__ = STICKY[0]
    assert is_sticky_device_error(translated)
    hidden = ModelError("the draft cannot be loaded")
    hidden.__context__, hidden.__suppress_context__ = STICKY[0], True
    assert is_sticky_device_error(hidden)
    hidden.__cause__ = hidden
    assert is_sticky_device_error(hidden), "a cycle of causes ends"


def test_torch_names_its_error_as_expected() -> None:
    assert issubclass(torch.AcceleratorError, RuntimeError)
