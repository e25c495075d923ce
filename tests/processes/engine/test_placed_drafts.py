"""Drafts in processes of their own, loaded from folders: same proposals, swaps, refusals, memory, and their end.

Their supervision: back-off, its reset, and shared memory for tensors.
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_worker.contract import DraftConfig, ModelConfig, NamedDraft, WorkerConfig
from specdecode_worker.drafts import own_device as process_supervisor
from specdecode_worker.drafts.own_device import DraftProcess, ProcessSupervisor
from specdecode_worker.drafts.own_device_process import Propose, TensorRegion
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.factory import load_engine
from specdecode_worker.engine.memory import DRAFT_PROCESS_BYTES, Device, take_inventory
from specdecode_worker.models.errors import ModelError
from support.kube import wait_for
from support.processes import has_ended
from support.worker import checkpoints
from support.worker.graph_ranks import die, double, refuse, serve
from support.worker.small_folders import SHAPE, config_of, write_head, write_target, write_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a target and of one draft of each method."""
    folder = tmp_path_factory.mktemp("models")
    made = {
        "target": write_target(folder / "target"),
        "eagle3": write_head(folder / "head"),
        "eagle": checkpoints.write(folder / "eagle", SHAPE | {"num_hidden_layers": 1}, checkpoints.eagle_tensors()),
        "draft-model": write_target(folder / "draft"),
    }
    for name in ("target", "draft-model"):
        write_tokenizer(made[name])
    return made


def config(folders: dict[str, Path], method: str, placement: str, **engine: Any) -> WorkerConfig:
    """Return a config in float64, which users cannot select, so that rounding changes no proposal."""
    worker = config_of(folders["target"], **{"max_num_seqs": 4, "kv_cache_tokens": 2048} | engine)
    draft = DraftConfig.model_validate(
        {"method": method, "uri": str(folders[method]), "placement": placement, "required": True}
    )
    model = ModelConfig.model_construct(**dict(worker.model) | {"dtype": "float64"})
    return worker.model_copy(update={"model": model, "draft": draft})


def generate(engine: Engine) -> dict[str, list[int]]:
    return serve(engine, "tree:2,1,1", range(6), max_tokens=24)


def pid_of(engine: Engine) -> int:
    drafter: Any = engine._drafts.loaded().drafter  # type: ignore[union-attr]
    return int(drafter._supervisor._process.pid)


def wait_until_gone(pid: int) -> None:
    wait_for("the draft process ends", lambda: has_ended(pid), timeout_s=30, every_s=0.05)


@pytest.mark.parametrize(
    ("method", "quantization"), [("eagle3", None), ("eagle3", "int8"), ("eagle", None), ("draft-model", None)]
)
def test_a_draft_process_proposes_what_a_local_draft_does(
    folders: dict[str, Path], method: str, quantization: str | None
) -> None:
    workers = [config(folders, method, placement) for placement in ("own", "shared")]
    own, local = (
        load_engine(one.model_copy(update={"draft": one.draft.model_copy(update={"quantization": quantization})}), Path)
        for one in workers
    )
    assert generate(own) == generate(local)
    one, two = own.report(), local.report()
    assert one.acceptance == two.acceptance
    assert sum(sum(cell.ranks[:-1]) for cell in one.acceptance) > 0, "no candidate was ever right"
    assert one.draft == two.draft
    assert pid_of(own) > 0


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_a_split_target_drafts_in_another_process(folders: dict[str, Path], method: str) -> None:
    """Its process has the whole output matrix, which a head of method eagle reads and each rank has a part of."""
    split = load_engine(config(folders, method, "own", tensor_parallel_size=2), Path)
    try:
        assert generate(split) == generate(load_engine(config(folders, method, "shared"), Path))
        assert split.report().drafts > 0
    finally:
        split.close()


def test_a_swap_starts_a_process_and_ends_that_of_the_draft_before(folders: dict[str, Path]) -> None:
    engine = load_engine(config(folders, "eagle3", "shared"), Path)
    plain = generate(engine)
    pids = []
    for method, placement in (("eagle3", "own"), ("draft-model", "own"), ("eagle3", "shared")):
        draft = DraftConfig.model_validate({"method": method, "uri": str(folders[method]), "placement": placement})
        assert engine.load_draft is not None
        engine.set_draft("", engine.load_draft(draft))
        if placement == "own":
            pids.append(pid_of(engine))
        gc.collect()
        assert generate(engine) == plain
    assert len(set(pids)) == 2
    for pid in pids:
        wait_until_gone(pid)


def test_a_loaded_draft_that_is_never_used_leaves_no_process(folders: dict[str, Path]) -> None:
    engine = load_engine(config(folders, "eagle3", "shared"), Path)
    assert engine.load_draft is not None
    drafter: Any = engine.load_draft(
        DraftConfig(method="eagle3", uri=str(folders["eagle3"]), placement="own"), "other"
    ).drafter
    pid = drafter._supervisor._process.pid
    assert Path(f"/proc/{pid}").exists()
    del drafter
    gc.collect()
    wait_until_gone(pid)


def test_a_draft_for_a_task_has_a_process_of_its_own(folders: dict[str, Path]) -> None:
    worker = config(folders, "eagle3", "own")
    named = NamedDraft(name="other", method="draft-model", uri=str(folders["draft-model"]), placement="own")
    engine = load_engine(worker.model_copy(update={"drafts": (named,)}), Path)
    plain = generate(load_engine(config(folders, "eagle3", "shared"), Path))
    assert generate(engine) == plain
    assert [draft.name for draft in engine.report().named_drafts] == ["other"]
    other: Any = engine._drafts.loaded("other").drafter  # type: ignore[union-attr]
    assert other._supervisor._process.pid != pid_of(engine)


def test_a_draft_that_does_not_fit_is_refused_by_the_reason(folders: dict[str, Path], tmp_path: Path) -> None:
    """A draft process gives the reason that a shared draft has."""
    engine = load_engine(config(folders, "eagle3", "shared"), Path)
    assert engine.load_draft is not None
    wrong = write_head(tmp_path / "wrong")
    (wrong / "model.safetensors").write_bytes((folders["draft-model"] / "model.safetensors").read_bytes())
    reasons = []
    for placement in ("own", "shared"):
        draft = DraftConfig.model_validate({"method": "eagle3", "uri": str(wrong), "placement": placement})
        with pytest.raises(ModelError) as caught:
            engine.load_draft(draft)
        reasons.append(str(caught.value))
    assert reasons[0] == reasons[1]
    assert "set method: draft-model" in reasons[0]


def test_a_missing_device_is_named(folders: dict[str, Path]) -> None:
    """On a GPU the draft needs the one behind those of the target."""
    engine = load_engine(config(folders, "eagle3", "shared"), Path)
    checked: Any = engine.load_draft
    load = dataclasses.replace(checked.loader, device=torch.device("cuda", 1))
    draft = DraftConfig(method="eagle3", uri=str(folders["eagle3"]), placement="own")
    with pytest.raises(ModelError, match="needs a GPU beside the target's, and torch sees 0 here"):
        load(draft)
    # Its memory is not that of the target's device, so no check of that refuses it.
    with pytest.raises(ModelError, match="torch sees 0 here"):
        dataclasses.replace(checked, loader=load, free_bytes=lambda: 0)(draft)
    with pytest.raises(ModelError, match=r"and 0\.00 GiB are free"):
        dataclasses.replace(checked, free_bytes=lambda: 0)(draft)


def test_the_memory_of_a_gpu_holds_no_part_of_the_draft_but_its_states(folders: dict[str, Path]) -> None:
    gpu = Device(kind="cuda", limit=80 * 2**30, free=80 * 2**30, source="GPU memory")
    own, shared, plain = (
        take_inventory(worker, Path, torch.device("cuda"), gpu).budget
        for worker in (
            config(folders, "eagle3", "own"),
            config(folders, "eagle3", "shared"),
            config_of(folders["target"], max_num_seqs=4, kv_cache_tokens=2048),
        )
    )
    assert (own.drafts, own.draft_weights, own.runtime) == ((), 0, plain.runtime)
    assert shared.bytes_per_token > own.bytes_per_token
    assert own.aux_size == shared.aux_size > 0, "the target's device stores the states that the draft reads"


@pytest.mark.parametrize(("method", "matrices"), [("eagle3", 1), ("eagle", 2), ("draft-model", 0)])
def test_the_memory_of_a_cpu_holds_the_process_too(folders: dict[str, Path], method: str, matrices: int) -> None:
    """The process has copies of the embedding and lm_head of the target, which a shared head uses."""
    own, shared = (
        take_inventory(config(folders, method, placement), Path, CPU).budget for placement in ("own", "shared")
    )
    assert own.drafts == shared.drafts
    assert own.spent - shared.spent == DRAFT_PROCESS_BYTES + matrices * SHAPE["vocab_size"] * SHAPE["hidden_size"] * 8


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
    process = DraftProcess(build, TensorRegion(4096), TensorRegion(4096), 30.0)
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
