"""Kernels run through Triton's interpreter in this folder; tests/gpu runs the same checks compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "support"))  # tests import `interpreted` and cases from there

from interpreted import import_kernels, mutant

import_kernels()

Plant = Callable[[ModuleType, str, str], ModuleType]


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """A copy of a kernel's module with a piece of its source replaced."""
    return lambda module, old, new: mutant(module, old, new, tmp_path)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors that are made without values hold NaN, or the largest negative integer: what a kernel does not write
    shows."""
    right = torch.empty

    def empty(*args: object, **kwargs: object) -> torch.Tensor:
        made = right(*args, **kwargs)  # type: ignore[call-overload]
        filled: torch.Tensor = made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).min)
        return filled

    monkeypatch.setattr(torch, "empty", empty)
    return


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations take their GPU path for CPU tensors too."""
    from specdecode_kernels import dispatch

    monkeypatch.setattr(dispatch, "on_gpu", lambda _: True)
