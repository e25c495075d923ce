"""Tests that need a GPU: `make gpu` runs them; elsewhere they are skipped, and say why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "no GPU: the same kernels run interpreted in tests/kernels"
    import triton.language as tl

    if type(tl.sum).__name__ == "InterpretedFunction":
        return "Triton interprets in this process: run tests/gpu by itself, with TRITON_INTERPRET=0"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := _why_not():
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))
