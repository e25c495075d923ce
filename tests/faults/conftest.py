"""Workers for the fault tests: real server and engine processes on loopback, started as a user starts them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdecode_worker.contract import WorkerConfig
from support import small_model
from support.faults.worker_flags import EMBEDDED_FLAGS, SMALL_FLAGS
from support.worker_process import StartWorker, WorkerProcess, fake, real, worker_config


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
    """Yield ``start(capture=None, environment=None, capture_dir=None, **server)``: a server around the fake engine."""
    with contextlib.ExitStack() as stack:

        def start(
            capture: dict[str, object] | None = None,
            environment: dict[str, str] | None = None,
            capture_dir: str | None = None,
            **server: object,
        ) -> WorkerProcess:
            config = worker_config(small_folder).model_dump() | {"capture": capture, "capture_dir": capture_dir}
            config["server"] |= {"host": "127.0.0.1", "port": 0, "admin_port": 0, **server}
            variables = {"SPECDECODE_TERMINATION_LOG": str(tmp_path / "fake.termination"), **(environment or {})}
            config_json = WorkerConfig.model_validate(config).model_dump_json()
            worker = stack.enter_context(fake(config_json, tmp_path / "fake.log", variables))
            worker.wait_ready()
            return worker

        yield start


@pytest.fixture
def start_embedded(tmp_path: Path) -> Iterator[StartWorker]:
    """Yield a function that starts a worker with SmolLM2-135M and its real tokenizer, ready after about 20 seconds."""
    with _starter(tmp_path, EMBEDDED_FLAGS) as start:
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
            worker = stack.enter_context(real([*base_flags, *flags], log, variables))
            worker.wait_ready()
            return worker

        yield start
