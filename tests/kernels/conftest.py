"""Configuration of the tests that run kernels in Triton's interpreter; tests/gpu runs the same checks compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.utils._device

from support.kernels.interpreted import Plant, import_kernels, mutant

import_kernels()
# torch lists the functions that `with torch.device` reaches when it is first used, once a process. Where `poisoned`
# stands for torch.empty then, no later test gets a network on the meta device.
torch.utils._device._device_constructors()


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Return a function that makes a copy of a kernel module with a piece of its source replaced: the proof planted."""
    return lambda module, old, new: mutant(module, old, new, tmp_path)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill newly allocated tensors with NaN or the smallest integer, so that elements a kernel does not write show."""
    right = torch.empty

    def empty(*args: object, **kwargs: object) -> torch.Tensor:
        made = right(*args, **kwargs)  # type: ignore[call-overload]
        filled: torch.Tensor = made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).min)
        return filled

    monkeypatch.setattr(torch, "empty", empty)
    return


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make operations take their GPU path for CPU tensors too."""
    from specdecode_kernels import dispatch

    monkeypatch.setattr(dispatch, "on_gpu", lambda _: True)


SLOW_INTERPRETED = (
    "planted",
    "detected",
    "random",
    "processed_tokens_equal",
    "edges_of_the_parameters",
    "more_chunks_than_are_merged",
)
"""Parts of the names of tests that take over two seconds in the interpreter: properties and planted bugs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "plant" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.proof("planted"))
        if Path(__file__).parent / "triton" in item.path.parents and any(
            part in item.name for part in SLOW_INTERPRETED
        ):
            item.add_marker("slow")
