"""A server process for tests: started on free ports, observed through its log, and ended with the test."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

from specdecode_worker.contract import EngineConfig, Env, ModelConfig, Plan, Report, Route, ServerConfig, WorkerConfig
from specdecode_worker.contract.capture import CaptureReport
from support.processes import spawned

SERVE_FAKE = Path(__file__).parent / "worker" / "serve_fake.py"
"""Server around a fake engine."""

StartWorker = Callable[..., "WorkerProcess"]
"""Function that starts a worker with the given flags or fields and waits until it is ready."""


SERVER: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "admin_port": 0, "max_waiting": 4}
SERVER |= {"endpoint_delay_seconds": 0.1, "grace_period_seconds": 5}


def worker_config(
    folder: Path, *, dtype: Any = "bfloat16", server: Mapping[str, Any] | None = None, **engine: Any
) -> WorkerConfig:
    """Return the config of a worker on free ports of loopback, with other fields of its server and its engine."""
    return WorkerConfig(
        deployment_uid="uid-1",
        model=ModelConfig(uri=f"file://{folder}", served_name="small", dtype=dtype),
        engine=EngineConfig(**{"max_num_seqs": 4, **engine}),
        server=ServerConfig(**SERVER | dict(server or {})),
    )


class ServerProcess:
    """A running server process. ``public`` is the base URL of its port, known once it listens."""

    port_name = "public"

    def __init__(self, words: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self._log = log
        own = {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(log.parent)}
        variables = {**os.environ, **own, **(environment or {})}
        with log.open("wb") as out:
            self.process = subprocess.Popen(words, stdout=out, stderr=out, env=variables)
        self.public = self._url(self.port_name)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def pids(self) -> tuple[int, ...]:
        return (self.process.pid,)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.public + path, timeout=10)

    def complete(
        self, prompt: object = "hello", *, timeout: float = 60, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """Ask the model "small" to complete a prompt; ``fields`` are further ones of the body, or replace others."""
        body = {"model": "small", "prompt": prompt, "max_tokens": 4, **fields}
        return httpx.post(f"{self.public}/v1/completions", json=body, headers=headers, timeout=timeout)

    def wait_ready(self, seconds: float = 240) -> None:
        self.wait_until(lambda: self.get("/ready").status_code == 200, seconds)

    def wait_until(self, condition: Callable[[], object], seconds: float = 10) -> None:
        """Poll ``condition``. Fail with the log if it stays false or the process ends."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)

    def _url(self, name: str) -> str:
        try:
            self.wait_until(lambda: f"{name} port: " in self.log, 120)
        except BaseException:  # nobody has this object yet, and could end the process
            self.process.kill()
            self.process.wait()
            raise
        match = re.search(rf"{name} port: (\S+)", self.log)
        assert match
        return match[1]


class WorkerProcess(ServerProcess):
    """A running worker. ``admin`` is the base URL of its admin port."""

    def __init__(self, words: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        super().__init__(words, log, environment)
        self._given_token = (environment or {}).get(Env.admin_token, "")
        self.admin = self._url("admin")

    @property
    def pids(self) -> tuple[int, ...]:
        return self.process.pid, self.engine_pid

    @property
    def termination_message(self) -> str:
        """Termination message of the worker, which the fault tests keep next to its log; empty without one."""
        path = self._log.with_suffix(".termination")
        return path.read_text() if path.exists() else ""

    @property
    def engine_pid(self) -> int:
        """Pid of the engine process: the child that is not multiprocessing's resource tracker."""
        (engine_pid,) = spawned(self.process.pid)
        return engine_pid

    def call_admin(self, path: str, method: str = "GET", **fields: Any) -> httpx.Response:
        """Call the admin port with the worker's token; ``fields`` are those of httpx.request."""
        headers = {"Authorization": f"Bearer {self.admin_token}", **fields.pop("headers", {})}
        return httpx.request(method, self.admin + path, headers=headers, **{"timeout": 10, **fields})

    def report(self) -> Report:
        answer = self.call_admin(Route.report, timeout=30)
        return Report.model_validate_json(answer.raise_for_status().content)

    def captured(self) -> CaptureReport:
        report = self.report().capture
        assert report is not None
        return report

    def put_plan(self, plan: Plan) -> None:
        answer = self.call_admin(Route.plan, "PUT", content=plan.model_dump_json(), timeout=30)
        assert answer.status_code == 200, answer.text

    @cached_property
    def admin_token(self) -> str:
        """Admin token of the environment, or that the worker made at start, from the file that its log names."""
        if self._given_token:
            return self._given_token
        self.wait_until(lambda: "admin token: " in self.log)
        match = re.search(r"admin token: .* is in (.+)", self.log)
        assert match
        return Path(match[1]).read_text().strip()


class RouterProcess(ServerProcess):
    port_name = "router"


@contextlib.contextmanager
def running_router(admin_urls: Iterable[str], log: Path, token: str, *flags: str) -> Iterator[RouterProcess]:
    """Yield a router. It must end with code 0 after SIGTERM, unless the test has ended it."""
    words = [sys.executable, "-m", "specdecode_router", "serve", "--port", "0", "--endpoint-delay-seconds", "0"]
    words += [*(f"--worker={url}" for url in admin_urls), *flags]
    router = RouterProcess(words, log, {Env.admin_token: token})
    try:
        yield router
        if router.process.poll() is None:
            router.terminate()
            assert router.exit_code(20) == 0, router.log
    finally:
        router.process.kill()
        router.process.wait()


@contextlib.contextmanager
def running_worker(
    words: Sequence[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(words, log, environment)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()


def fake(
    config: WorkerConfig, log: Path, environment: dict[str, str] | None = None
) -> contextlib.AbstractContextManager[WorkerProcess]:
    """Return the server with the fake engine."""
    return running_worker([sys.executable, str(SERVE_FAKE), config.model_dump_json()], log, environment)


def real(
    flags: Sequence[str], log: Path, environment: dict[str, str] | None = None
) -> contextlib.AbstractContextManager[WorkerProcess]:
    """Return ``specdecode-worker serve``, started as a user would."""
    words = [sys.executable, "-m", "specdecode_worker", "serve", "--port", "0", "--admin-port", "0", *flags]
    return running_worker(words, log, environment)


@contextlib.contextmanager
def ready(starting: contextlib.AbstractContextManager[WorkerProcess]) -> Iterator[WorkerProcess]:
    with starting as worker:
        worker.wait_ready()
        yield worker
