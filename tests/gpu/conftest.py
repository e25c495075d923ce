"""Configuration of the tests that need a GPU: `make gpu` runs them; without a GPU they are skipped with a reason."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

_OF_THE_ENGINE = [name for name in ("msgspec", "pydantic") if find_spec(name) is None]
"""Missing packages that the engine needs. A machine with torch and triton alone tests only the kernels."""
collect_ignore = ["test_engine_gpu.py"] if _OF_THE_ENGINE else []


def pytest_report_header() -> str:
    return f"the engine is not tested here: {', '.join(_OF_THE_ENGINE)} missing" if _OF_THE_ENGINE else ""


def _skip_reason() -> str | None:
    if not torch.cuda.is_available():
        return "no GPU: the same kernels run interpreted in tests/kernels"
    import triton.language as tl

    if type(tl.sum).__name__ == "InterpretedFunction":
        return "Triton interprets in this process: run tests/gpu by itself, with TRITON_INTERPRET=0"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # `make gpu` runs several processes, each with one part: SPECDECODE_TESTS_PART is "index/parts".
    if part := os.environ.get("SPECDECODE_TESTS_PART"):
        index, parts = map(int, part.split("/"))
        items[:] = items[index::parts]
    if reason := _skip_reason():
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))
