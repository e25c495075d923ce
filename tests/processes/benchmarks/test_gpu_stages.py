"""Every stage of `make gpu` over the stand-in device, with tiny shapes, and the figures that its rows give."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[3]
GPU = ROOT / "benchmarks" / "gpu"
ALL_STAGES = ROOT / "tests" / "support" / "all_gpu_stages.py"
NAMES = (
    "copy", "engine-8b", "engine-8b-batches", "attention", "sampling", "serving", "prefill-attention",
    "products", "peers", "trees", "multi-round", "two-drafts", "texts", "quantised", "engine-8b-eager",
    "engine-8b-int4-draft", "engine-70b-eighth", "engine-scout-int4", "engine-scout-fp8",
    "engine-maverick-eighth",
)  # fmt: skip
PATH = os.pathsep.join(str(ROOT / place) for place in ("worker", "kernels", "kernels/bench"))
NOT_MEASURED = {"tree attention over FlashInfer's unmasked decode"}
"""Figures that need a package that is not installed here."""


def run_stages(which: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(GPU), PATH)),
        "TRITON_INTERPRET": "1" if which == "interpreted" else "0",
    }
    ran = subprocess.run([sys.executable, ALL_STAGES, which], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-4000:]
    results: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return results


@pytest.fixture(scope="module")
def stages() -> dict[str, Any]:
    return run_stages("other") | run_stages("interpreted")


@pytest.fixture(scope="module")
def rows(stages: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for results in stages.values() for row in results["rows"]]


@pytest.mark.parametrize("name", NAMES)
def test_stage_runs_to_its_end(name: str, stages: dict[str, Any]) -> None:
    assert not stages[name]["error"], stages[name]["error"]
    assert stages[name]["rows"]


def test_every_stage_is_run(stages: dict[str, Any]) -> None:
    assert set(stages) == set(NAMES)


def test_every_figure_is_measured(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the stages have what the table of figures reads."""
    monkeypatch.syspath_prepend(GPU)
    import targets

    verdicts = targets.judge(rows)
    assert {verdict.target for verdict in verdicts if verdict.measured is None} == NOT_MEASURED
    judged = [verdict.met for verdict in verdicts if verdict.measured is not None and verdict.bound is not None]
    assert None not in judged


def test_steps_of_the_engine_stages_run_through_graphs(rows: list[dict[str, Any]]) -> None:
    graphs = {row["stage"]: row["graphs"] for row in rows if row["kind"] == "step"}
    assert graphs == {name: name != "engine-8b-eager" for name in NAMES if name.startswith("engine-")}


def test_texts_of_exact_arithmetic_do_not_differ(rows: list[dict[str, Any]]) -> None:
    results = [row for row in rows if row["kind"] == "texts"]
    assert {row["case"] for row in results} == {"plain again", "plain, fewer at a time", "chain:3", "tree:4,2,1"}
    assert {row["share_differing"] for row in results} == {0.0}


def test_two_drafts_share_the_texts(rows: list[dict[str, Any]]) -> None:
    """All texts are drafted for, whichever draft is theirs."""
    results = {
        (row["drafts"], row["batch"]): row["measured_tokens_per_step"]
        for row in rows
        if row["kind"] == "drafts" and row["shape"] == "chain:3"
    }
    assert results == {(1, 1): 4.0, (1, 2): 4.0, (2, 1): 4.0, (2, 2): 4.0}


def test_differences_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(GPU)
    from stages.comparisons import differences

    results = differences([(1, 2, 3, 4), (5, 6, 7, 8)], [(1, 2, 9, 4), (5, 6, 7, 8)])
    assert results == {"texts": 2, "share_differing": 0.5, "share_of_tokens_before": 6 / 8}


def test_stage_that_dies_takes_no_other_along(tmp_path: Path) -> None:
    """The process of the first stage is ended by a signal, and has said what is no text; the next stage runs."""
    copied = tmp_path / "gpu"
    shutil.copytree(GPU, copied)
    kernels = copied / "stages" / "kernels.py"
    right = "from timing import copy_rate"
    assert kernels.read_text().count(right) == 1
    kernels.write_text(kernels.read_text().replace(right, r'import os; os.write(2, b"\xff"); os.abort()'))
    ran = subprocess.run(
        [sys.executable, copied, "--dry-run", "--out", tmp_path, "--stage", "sampling"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PATH},
    )
    document = json.loads((tmp_path / "dry-run.json").read_text())
    assert ran.returncode == 1
    assert {stage["name"]: stage["status"] for stage in document["stages"]} == {"copy": "failed", "sampling": "done"}
    assert "Stage copy: failed" in (tmp_path / "dry-run.md").read_text()


def test_the_compiled_peer_keeps_its_tensors_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step writes keys and values: torch.compile captures no graph of it unless it knows that they stay."""
    monkeypatch.syspath_prepend(GPU)
    import torch
    from shapes import TINY
    from stages.peers import dense, keep_in_place

    network = dense(TINY.target, torch.float32, torch.device("cpu"))
    keep_in_place(network)
    layer = network.layers[-1]
    held = network.embedding, network.head, network.cos, network.ones, layer.qkv, layer.down, layer.keys, layer.values
    assert all(getattr(one, "_dynamo_static_input_type", None) for one in held)
