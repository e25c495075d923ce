"""Kernel timings of a worker: which file is used, and what the log and the class of kernels say."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specdecode_kernels import timings
from specdecode_kernels.timings import Case, Timings, written
from specdecode_worker.contract import EngineConfig
from specdecode_worker.engine.kernel_class import kernel_class, use_kernel_timings

CUDA = torch.device("cuda")
MEASURED = Timings("NVIDIA H200", (Case(("fp8", 48, 64), 128, {"scaled": 5.0, "tile": 3.0}),))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Name a GPU that is not there, and restore the timings of other tests."""
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: properties.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    before = timings.current()
    yield
    timings.use(before)


def config(tmp_path: Path, measured: Timings = MEASURED, **fields: int) -> EngineConfig:
    path = tmp_path / "timings.json"
    path.write_text(written(measured))
    return EngineConfig(kernel_timings=str(path), **fields)


def test_timings_of_this_gpu_are_used_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plain = kernel_class(CUDA)
    measured = use_kernel_timings(config(tmp_path), CUDA)
    assert timings.current() is measured
    assert measured.products == MEASURED.products
    assert "product fp8x48x64: 128: tile" in caplog.text
    # workers that choose other kernels round otherwise, so they do not continue each other's answers
    assert kernel_class(CUDA) != plain
    assert measured.digest in kernel_class(CUDA)


@pytest.mark.parametrize(
    ("measured", "fields", "device", "said"),
    [
        (Timings("NVIDIA H100", MEASURED.products), {}, CUDA, "they are of NVIDIA H100, and this GPU is NVIDIA H200"),
        (MEASURED, {"tensor_parallel_size": 2}, CUDA, "operations choose by rules"),
        (MEASURED, {}, torch.device("cpu"), ""),
    ],
)
def test_other_timings_are_not_used(
    measured: Timings,
    fields: dict[str, int],
    device: torch.device,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    timings.use(MEASURED)
    use_kernel_timings(config(tmp_path, measured, **fields), device)
    assert timings.current() == Timings()
    assert said in caplog.text


@pytest.mark.parametrize("text", [None, "{"])
def test_a_file_that_cannot_be_read_ends_no_worker(
    text: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "timings.json"
    if text is not None:
        path.write_text(text)
    use_kernel_timings(EngineConfig(kernel_timings=str(path)), CUDA)
    assert timings.current() == Timings()
    assert "kernel timings are not used" in caplog.text
