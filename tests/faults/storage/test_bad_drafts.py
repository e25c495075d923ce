"""Drafts that cannot be loaded, at start and at a swap: the worker serves on, and the report says why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdecode_worker.contract import DraftConfig, Env, NamedDraft, Route
from support import small_model
from support.faults.bounds import healthy
from support.worker_process import StartWorker, WorkerProcess, worker_config

LOAD_SECONDS = 20.0


def _unreadable_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "nowhere")


def _calibration(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "calibration.json").write_text(text)


def _truncated_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _whole_model_with_infinity(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    small_model.write_target(folder)
    _spoil(folder, "model.layers.3.mlp.up_proj.weight", float("inf"))


def _spoil(folder: Path, name: str, value: float) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors[name][1, 2] = value
    save_file(tensors, folder / "model.safetensors")


UP_PROJ = "mlp.up_proj.weight"
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "unreadable-calibration": (lambda folder: (folder / "calibration.json").mkdir(), "calibration.json"),
    "unreadable-weights": (_unreadable_weights, "model.safetensors"),
    "nested-json": (_calibration('{"sharpness":' + "[" * 100_000 + "]" * 100_000 + "}"), "calibration.json"),
    "nan-calibration": (_calibration('{"sharpness": [NaN, 1e999]}'), "calibration.json"),
    "truncated": (_truncated_weights, "model.safetensors"),
    "nan-weights": (lambda folder: _spoil(folder, f"midlayer.{UP_PROJ}", float("nan")), f"midlayer.{UP_PROJ}"),
    "infinite-model": (_whole_model_with_infinity, "model.layers.3.mlp.up_proj.weight"),
}
"""Functions that spoil a good draft's folder, and what the message must name."""


def _bad_draft(kind: str, folder: Path) -> tuple[dict[str, str], str]:
    folder.mkdir()
    small_model.write_draft(folder)
    spoil, named = BAD[kind]
    spoil(folder)
    method = "draft-model" if kind == "infinite-model" else "eagle3"
    return {"uri": f"file://{folder}", "method": method}, named


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_draft_at_a_swap_leaves_plain_serving(small_worker: WorkerProcess, tmp_path: Path, kind: str) -> None:
    body, named = _bad_draft(kind, tmp_path / "draft")
    engine_pid = small_worker.engine_pid
    with healthy(small_worker):
        problem = _swap_problem(small_worker, body)
        _assert_serves(small_worker, engine_pid)
    assert named in problem, problem
    assert problem.count(". ") == 0, f"one sentence: {problem}"


def test_an_unreadable_folder_is_refused_at_a_swap(small_worker: WorkerProcess) -> None:
    engine_pid = small_worker.engine_pid
    problem = _swap_problem(small_worker, {"uri": "file:///" + "x" * 300, "method": "eagle3"})
    _assert_serves(small_worker, engine_pid)
    assert "xxx" in problem


def test_bad_drafts_at_start_leave_plain_serving(start_pod: StartWorker, small_folder: Path, tmp_path: Path) -> None:
    bad = {kind: _bad_draft(kind, tmp_path / kind) for kind in BAD}
    (first, *others) = bad
    worker = start_pod(environment=_pod(small_folder, [bad[first][0], *({"name": k, **bad[k][0]} for k in others)]))
    _assert_serves(worker, worker.engine_pid)
    drafts = _drafts(worker)
    problems = {"": drafts["draft"]["problem"]} | {draft["name"]: draft["problem"] for draft in drafts["named_drafts"]}
    print(json.dumps(problems, indent=1))
    assert all(bad[kind][1] in problems["" if kind == first else kind] for kind in bad)


def test_a_required_draft_that_cannot_be_loaded_is_fatal(
    start_pod: StartWorker, small_folder: Path, tmp_path: Path
) -> None:
    body, named = _bad_draft("nested-json", tmp_path / "draft")
    with pytest.raises((AssertionError, httpx.HTTPError)):
        start_pod(environment=_pod(small_folder, [{"required": True, **body}]))
    log = (tmp_path / "worker-0.log").read_text()
    assert named in log
    assert "Traceback" not in log, "an explained error needs no traceback"


def _pod(target: Path, drafts: list[dict[str, Any]]) -> dict[str, str]:
    """Return the environment of a pod with these drafts, the default draft first."""
    default, *others = drafts
    models = {
        "draft": DraftConfig.model_validate(default),
        "drafts": tuple(NamedDraft.model_validate(draft) for draft in others),
    }
    config = worker_config(target, dtype="float32", kv_cache_tokens=4096, device="cpu", threads=1)
    return {Env.config: config.model_copy(update=models).model_dump_json()}


def _swap_problem(worker: WorkerProcess, body: dict[str, str]) -> str:
    """Ask for a swap and return the reason of its failure: of the 409, or of the report after a 202."""
    answer = worker.call_admin(Route.draft, "PUT", json=body, timeout=30)
    if answer.status_code == 409:
        message: str = answer.json()["error"]["message"]
        return message
    assert answer.status_code == 202, answer.text
    worker.wait_until(lambda: _drafts(worker)["draft"]["pending"] is None, LOAD_SECONDS)
    problem: str | None = _drafts(worker)["draft"]["swap_problem"]
    assert problem is not None, "the bad draft was taken over"
    return problem


def _drafts(worker: WorkerProcess) -> dict[str, Any]:
    drafts: dict[str, Any] = worker.call_admin(Route.draft, timeout=30).json()
    return drafts


def _assert_serves(worker: WorkerProcess, engine_pid: int) -> None:
    answer = worker.complete(timeout=30, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    assert worker.engine_pid == engine_pid
