"""Workers for the fault tests: real server and engine processes on loopback, started as a user starts them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import small_model
from support.faults.workers import EMBEDDED_FLAGS, SMALL_FLAGS
from support.worker_process import StartWorker, WorkerProcess, fake, ready, real, worker_config


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small random Llama with one token per byte and a context of 256 tokens."""
    folder = tmp_path_factory.mktemp("small")
    small_model.write_target(folder)
    return folder


@pytest.fixture
def start_small(small_folder: Path, tmp_path: Path) -> Iterator[StartWorker]:
    """Yield a function that starts a worker with the small model, ready after about ten seconds."""
    with _starter(tmp_path, ("--model", f"file://{small_folder}", *SMALL_FLAGS)) as start:
        yield start


@pytest.fixture
def start_pod(tmp_path: Path) -> Iterator[StartWorker]:
    """Yield a function that starts a worker from the configuration in its environment, as in a pod."""
    with _starter(tmp_path, ()) as start:
        yield start


@pytest.fixture
def start_fake(small_folder: Path, tmp_path: Path) -> Iterator[StartWorker]:
    """Yield ``start(environment=None, capture_dir=None, **server)``: a server around the fake engine."""
    with contextlib.ExitStack() as stack:

        def start(
            environment: dict[str, str] | None = None,
            capture_dir: str | None = None,
            **server: object,
        ) -> WorkerProcess:
            config = worker_config(small_folder, server=server).model_copy(update={"capture_dir": capture_dir})
            variables = {"SPECDECODE_TERMINATION_LOG": str(tmp_path / "fake.termination"), **(environment or {})}
            return stack.enter_context(ready(fake(config, tmp_path / "fake.log", variables)))

        yield start


@pytest.fixture(scope="module")
def small_worker(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """Yield one worker with the small model for all tests of a module. A test must leave it idle and healthy."""
    with _starter(tmp_path_factory.mktemp("worker"), ("--model", f"file://{small_folder}", *SMALL_FLAGS)) as start:
        yield start()


@pytest.fixture(scope="module")
def embedded_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """Yield one worker with SmolLM2-135M for all tests of a module. A test must leave it idle and healthy."""
    with _starter(tmp_path_factory.mktemp("worker"), EMBEDDED_FLAGS) as start:
        yield start()


@contextlib.contextmanager
def _starter(folder: Path, base_flags: tuple[str, ...]) -> Iterator[StartWorker]:
    with contextlib.ExitStack() as stack:

        def start(*flags: str, environment: dict[str, str] | None = None) -> WorkerProcess:
            log = folder / f"worker-{len(list(folder.glob('worker-*.log')))}.log"
            variables = {"SPECDECODE_TERMINATION_LOG": str(log.with_suffix(".termination")), **(environment or {})}
            return stack.enter_context(ready(real([*base_flags, *flags], log, variables)))

        yield start
