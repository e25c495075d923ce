"""Assigned drafts and the trial of a candidate, on a worker with the embedded model and head."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specdecode_worker.contract import (
    Artifact,
    DraftAssignment,
    DraftConfig,
    DraftTrial,
    EngineConfig,
    Env,
    ModelConfig,
    Plan,
    PlanRow,
    Report,
    Route,
    ServerConfig,
    TreeShape,
    WorkerConfig,
)
from specdecode_worker.models.fetch import model_hash, resolve
from support import small_model
from support.e2e.draft_files import write_noised_head
from support.faults.bounds import healthy
from support.storage_servers.s3_server import S3Server, s3_server
from support.worker_process import StartWorker, WorkerProcess, ready, real, worker_config

TARGET, SPEC = "embedded://smollm2-135m-instruct", "embedded://smollm2-135m-instruct-eagle3"
POD = "pod-a"
CONFIG = WorkerConfig(
    deployment_uid="uid-1",
    model=ModelConfig(uri=TARGET, served_name="m", dtype="float32"),
    draft=DraftConfig(method="eagle3", uri=SPEC),
    engine=EngineConfig(max_num_seqs=2, kv_cache_tokens=4096, device="cpu", threads=1),
    server=ServerConfig(host="127.0.0.1", port=0, admin_port=0),
)
PROMPTS = ("def add(a, b):", "The capital of France is", "1, 2, 3, 4,", "Dear Sir,", "x = [", "Once upon a time")
SECONDS = 60.0


@pytest.fixture(scope="module")
def noised(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Return a copy of the embedded head with noise on its weights."""
    folder = tmp_path_factory.mktemp("noised") / "head"
    write_noised_head(folder, 0.3)
    return Artifact(uri=f"file://{folder}", hash=model_hash(folder))


class Pod:
    """Worker with plans of rising versions."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.version = 10
        self.spec_hash = model_hash(resolve(SPEC))

    def plan(self, stable: Artifact | None = None, trial: DraftTrial | None = None, *, drafts: bool = True) -> Plan:
        self.version += 1
        rows = tuple(PlanRow(concurrency=load, context=0, shape=TreeShape.chain(3)) for load in range(3))
        return Plan(
            uid="uid-1",
            draft=self.spec_hash,
            version=self.version,
            rows=rows if drafts else (),
            explore=0,
            guard=False,
            assignment=DraftAssignment(spec_draft=SPEC, target=TARGET, stable=stable, trial=trial),
        )

    def push(self, *args: Any, **fields: Any) -> None:
        self.worker.put_plan(self.plan(*args, **fields))

    def report(self) -> Report:
        return self.worker.report()

    def wait(self, condition: Callable[[Report], object]) -> Report:
        deadline = time.monotonic() + SECONDS
        while not condition(report := self.report()):
            assert time.monotonic() < deadline, report.model_dump_json(include={"draft", "trial", "plan"})
            time.sleep(0.05)
        return report

    def text(self, prompt: str) -> str:
        answer = self.worker.complete(prompt, model="m", max_tokens=12, temperature=0, ignore_eos=True)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def texts(self) -> list[str]:
        """Return the answers to all prompts, two requests at once."""
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(self.text, PROMPTS))


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    folder = tmp_path_factory.mktemp("pod")
    environment = {Env.config: CONFIG.model_dump_json(), Env.pod_name: POD}
    with ready(real([], folder / "worker.log", environment)) as worker:
        yield Pod(worker)


def trial(candidate: Artifact, **fields: Any) -> DraftTrial:
    return DraftTrial(**{"id": "t1", "candidate": candidate, "pod": POD, "block_requests": 2, **fields})


def test_texts_of_a_trial_equal_plain_decoding(pod: Pod, noised: Artifact) -> None:
    pod.push(None, drafts=False)
    plain = pod.texts()
    pod.push(None, trial(noised, id="texts"))
    while (state := pod.report().trial) is None or len(state.pairs) < 2:
        assert state is None or state.state != "Failed", state
        assert pod.texts() == plain
    report = pod.report()
    assert report.plan.matches_draft
    assert [pair.index for pair in state.pairs] == list(range(len(state.pairs)))
    assert all(side and all(cost.tokens for cost in side) for p in state.pairs for side in (p.incumbent, p.candidate))
    drafts = {cell.draft for cell in report.acceptance}
    assert {pod.spec_hash, noised.hash} <= drafts
    pod.push(None)
    pod.wait(lambda report: report.draft.hash == pod.spec_hash and report.trial is None)


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.1, 0.2, 0.4])
def test_folder_that_vanishes_while_it_loads_fails_the_trial_or_is_loaded(
    pod: Pod, noised: Artifact, tmp_path: Path, delay_s: float
) -> None:
    """Files that the worker has opened stay readable; the outcome depends on the moment."""
    folder = tmp_path / "vanishing"
    shutil.copytree(noised.uri.removeprefix("file://"), folder)
    with healthy(pod.worker):
        pod.push(None, trial(Artifact(uri=f"file://{folder}", hash=noised.hash), id=f"vanishing-{delay_s}"))
        time.sleep(delay_s)
        shutil.rmtree(folder)
        report = pod.wait(lambda report: report.trial is not None and report.trial.state != "Loading")
        pod.text(PROMPTS[0])
    print(delay_s, report.trial.state, report.trial.problem)
    if report.trial.state == "Failed":
        assert report.draft.hash == pod.spec_hash
        assert str(folder) in (report.trial.problem or "")
    pod.push(None)
    pod.wait(lambda report: report.trial is None)


@pytest.mark.parametrize("files", ["right", "wrong"])
def test_a_worker_starts_with_the_assigned_draft(noised: Artifact, tmp_path: Path, files: str) -> None:
    stable = noised if files == "right" else noised.model_copy(update={"hash": "0123456789abcdef"})
    assignment = DraftAssignment(spec_draft=SPEC, target=TARGET, stable=stable)
    plan = Plan(uid="uid-1", draft=stable.hash, version=1, initial=TreeShape.chain(3), explore=0, assignment=assignment)
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    environment = {Env.config: CONFIG.model_dump_json(), Env.plan_path: str(tmp_path / "plan.json")}
    with ready(real([], tmp_path / "worker.log", environment)) as worker:
        started = Pod(worker)
        report = started.report()
        assert started.text(PROMPTS[1])
    if files == "right":
        assert (report.draft.hash, report.draft.uri, report.draft.swap_problem) == (stable.hash, stable.uri, None)
    else:
        assert report.draft.hash == started.spec_hash
        assert f"has the hash {noised.hash}" in (report.draft.swap_problem or "")


FIRST, NEXT = "s3://heads/first", "s3://heads/next"
LOAD_SECONDS = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


def _upload(server: S3Server, folder: Path, uri: str) -> str:
    """Upload a small head and return its hash."""
    from specdecode_worker.models import download

    folder.mkdir()
    small_model.write_draft(folder)
    (folder / "calibration.json").write_text(f'{{"sharpness": [{len(uri)}.0]}}')
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        download.upload(folder, uri)
    return model_hash(folder)


def _environment(target: Path, cache: Path, variables: dict[str, str]) -> dict[str, str]:
    config = worker_config(target, dtype="float32", max_num_seqs=2, kv_cache_tokens=2048, device="cpu", threads=1)
    models = {"draft": DraftConfig(method="eagle3", uri=FIRST), "cache_dir": str(cache)}
    return {Env.config: config.model_copy(update=models).model_dump_json(), **variables}


def _running_hash(worker: WorkerProcess) -> str:
    return str(worker.call_admin(Route.draft).json()["draft"]["hash"])


def test_worker_takes_drafts_from_a_bucket(
    server: S3Server, small_folder: Path, start_pod: StartWorker, tmp_path: Path
) -> None:
    """A real S3 server: at start, at a swap of a running worker, and while the server is gone."""
    first, following = (_upload(server, tmp_path / name, uri) for name, uri in (("first", FIRST), ("next", NEXT)))
    assert first != following
    cache = tmp_path / "cache"
    worker = start_pod(environment=_environment(small_folder, cache, server.environment))
    assert _running_hash(worker) == first
    body = {"uri": NEXT, "method": "eagle3", "expected_hash": following}
    refused = worker.call_admin(Route.draft, "PUT", json=body | {"expected_hash": "0" * 16})
    assert (refused.status_code, following in refused.text) == (409, True)
    assert worker.call_admin(Route.draft, "PUT", json=body).status_code == 202
    worker.wait_until(lambda: _running_hash(worker) == following, LOAD_SECONDS)
    missing = worker.call_admin(Route.draft, "PUT", json={"uri": "s3://heads/none", "method": "eagle3"})
    assert (missing.status_code, "does not exist" in missing.text or "holds no" in missing.text) == (409, True)
    assert _running_hash(worker) == following
    assert worker.complete().status_code == 200
    worker.terminate()
    worker.exit_code()
    gone = server.environment | {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}
    again = start_pod(environment=_environment(small_folder, cache, gone))
    assert _running_hash(again) == first, "the draft that was fetched before serves while the store is gone"
