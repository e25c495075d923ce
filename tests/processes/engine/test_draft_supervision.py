"""Supervision of draft processes: back-off, its reset, and shared memory for tensors."""

from __future__ import annotations

import multiprocessing
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from specdecode_worker.drafts import own_device as process_supervisor
from specdecode_worker.drafts.own_device import DraftProcess, ProcessSupervisor, Regions
from specdecode_worker.drafts.own_device_process import Propose, TensorRegion
from specdecode_worker.models.errors import ModelError
from support.kube import wait_for
from support.worker.draft_children import die, double, refuse


def regions() -> Regions:
    return Regions(TensorRegion(4096), TensorRegion(4096))


class ScriptedProcess:
    """Process that is lost at once, or never ready."""

    def __init__(self, *, fails: bool) -> None:
        self.fails, self.killed, self.pid, self.started_seconds = fails, False, 1, time.monotonic()

    def wait_ready(self) -> None:
        if self.fails:
            raise ModelError("the file is gone")

    def send(self, message: Any, tensors: Any) -> None:
        raise process_supervisor.DraftLost("ended with exit code -9")

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (refuse, "/models/head/config.json cannot be read: No such file or directory"),
        (die, "the draft process ended with exit code -9"),
    ],
)
def test_a_draft_that_cannot_be_loaded_is_an_error_with_its_reason(build: Any, reason: str) -> None:
    process = DraftProcess(build, regions(), 30.0)
    with pytest.raises(ModelError, match=reason):
        process.wait_ready()
    process.kill()


def test_restarts_back_off_until_a_process_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delay doubles with every attempt, and the reason of the last one is shown."""
    monkeypatch.setattr(process_supervisor, "LONGEST_DELAY_SECONDS", 0.05)
    made: list[ScriptedProcess] = []
    delays: list[float] = []

    def start() -> Any:
        made.append(ScriptedProcess(fails=len(made) < 4))
        delays.append(supervisor._delay)
        return made[-1]

    first: Any = ScriptedProcess(fails=False)
    supervisor = ProcessSupervisor(first, start, first_delay=0.01)
    assert supervisor.usable
    assert supervisor.ask(Propose((), (), ()), []) == []
    assert first.killed
    assert not supervisor.usable
    assert "ended with exit code -9; requests decode plainly" in supervisor.problem
    wait_for("a process is ready", lambda: supervisor._restarted is not None, every_s=0.005)
    assert supervisor.problem.startswith("the file is gone; requests decode plainly")
    assert delays == [0.02, 0.04, 0.05, 0.05, 0.05]
    assert [process.killed for process in made] == [True] * 4 + [False]
    assert not supervisor.usable, "the engine thread takes it over"
    assert supervisor.take_restarted()
    assert (supervisor.usable, supervisor.problem) == (True, "")
    assert not supervisor.take_restarted()
    supervisor.close()
    assert made[-1].killed


def test_nothing_is_restarted_after_close() -> None:
    made: list[Any] = []
    supervisor = ProcessSupervisor(
        ScriptedProcess(fails=False),  # type: ignore[arg-type]
        lambda: made.append(1),  # type: ignore[arg-type, return-value]
        first_delay=0.01,
    )
    supervisor.close()
    supervisor.send(Propose((), (), ()), [])
    time.sleep(0.1)
    assert not made


def test_close_ends_a_process_that_loads() -> None:
    loading = threading.Event()

    class LoadingProcess(ScriptedProcess):
        def wait_ready(self) -> None:
            loading.set()
            wait_for("it is killed", lambda: self.killed, every_s=0.005)
            raise ModelError("the draft process ended with exit code -9")

    made: list[LoadingProcess] = []

    def start() -> Any:
        made.append(LoadingProcess(fails=False))
        return made[-1]

    first: Any = ScriptedProcess(fails=False)
    supervisor = ProcessSupervisor(first, start, first_delay=0.01)
    supervisor.send(Propose((), (), ()), [])
    problem = supervisor.problem
    assert loading.wait(30)
    supervisor.close()
    assert made[0].killed
    time.sleep(0.1)
    assert len(made) == 1
    assert supervisor.problem == problem, "the end of that process is no problem"


def test_a_region_is_shared_with_a_process() -> None:
    region, tensors = TensorRegion(1024), [torch.tensor([1, 2, 3]), torch.tensor([[1.5, 2.0], [3.0, 4.0]])]
    shapes = region.put([tensors[0], tensors[1].bfloat16()])
    spawn = multiprocessing.get_context("spawn")
    own_end, child_end = spawn.Pipe()
    process = spawn.Process(target=partial(double, region, child_end))
    process.start()
    assert own_end.recv()
    process.join()
    doubled = region.get(shapes)
    assert doubled[0].tolist() == [2, 4, 6]
    assert doubled[1].tolist() == [[3.0, 4.0], [6.0, 8.0]]


def test_a_message_that_is_too_large_is_an_error() -> None:
    region = TensorRegion(64)
    region.put([torch.zeros(8, dtype=torch.int64)])
    with pytest.raises(ValueError, match="more than the 64 bytes"):
        region.put([torch.zeros(9, dtype=torch.int64)])
