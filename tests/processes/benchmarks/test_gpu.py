"""`make gpu` without a GPU: a dry run is measured and reported, and the targets are evaluated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdecode_simulator.records.step_times import published

ROOT = Path(__file__).parents[3]
GPU = ROOT / "benchmarks" / "gpu"


@pytest.fixture(autouse=True)
def _modules_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(GPU)


def hack_gpu(out: Path, *flags: str, OUT: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": OUT}
    command = [ROOT / "hack" / "gpu", "--dry-run", "--out", out, *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def judge(rows: list[dict[str, Any]]) -> dict[tuple[str, str], bool | None]:
    """Return whether each target was met, by target and case. None means that it was not measured."""
    import targets

    return {(verdict.target, verdict.case): verdict.met for verdict in targets.judge(rows)}


@pytest.mark.timeout(600)
def test_a_dry_run_is_measured_and_reported(tmp_path: Path) -> None:
    """One engine stage runs through the whole pipeline of figures. test_gpu_stages.py runs every stage."""
    ran = hack_gpu(tmp_path, "--stage", "engine-8b")
    assert ran.returncode == 0, ran.stderr
    document = json.loads((tmp_path / "dry-run.json").read_text())
    assert document["dry_run"]
    assert {"gpu", "driver", "torch", "triton", "commit", "date"} <= document["machine"].keys()
    rows = document["rows"]
    steps = {(row["batch"], row["shape"]): row for row in rows if row["kind"] == "step" and row["stage"] == "engine-8b"}
    assert {batch for batch, _ in steps} == {1, 2}
    for (_, shape), row in steps.items():
        assert row["synthetic"] == (shape != "plain")
        depth = {"plain": 0, "chain:3": 3, "chain:5": 5, "tree:4,2,1": 3}[shape]
        assert row["measured_tokens_per_step"] == 1 + depth, "every draft of the random networks is right"
        assert row["bytes_read"] > steps[row["batch"], "plain"]["bytes_read"] or shape == "plain"
    speedups = [row for row in rows if row["kind"] == "speedup"]
    assert all(row["synthetic"] and 1 <= row["measured_tokens_per_step"] <= 4 for row in speedups)
    # In the three steps of a dry run, one text's drafts may all be accepted: one in ten.
    assert min(row["measured_tokens_per_step"] for row in speedups) < 4, "acceptance was not set"
    report = subprocess.run(
        [sys.executable, GPU / "report.py", tmp_path / "dry-run.json"], capture_output=True, text=True
    )
    assert report.returncode == 0, report.stderr
    assert "Dry run" in report.stdout
    assert report.stdout == (tmp_path / "dry-run.md").read_text() + "\n"
    assert report.stdout.count("| chain:3 *") == 2 * len(speedups)
    assert (tmp_path / "dry-run.png").stat().st_size > 0


def test_run_without_time_reports_that_no_time_was_left(tmp_path: Path) -> None:
    ran = hack_gpu(tmp_path, "--seconds", "0", "--skip", "tests")
    document = json.loads((tmp_path / "dry-run.json").read_text())
    assert ran.returncode == 1
    assert {stage["status"] for stage in document["stages"]} == {"no time was left"}
    assert all(target["met"] is None for target in document["targets"])


@pytest.mark.timeout(300)
def test_a_repeated_run_keeps_what_the_same_code_has_measured(tmp_path: Path) -> None:
    path, returned = tmp_path / "dry-run.json", tmp_path / "returned"

    def copy_rate(*flags: str) -> float:
        ran = hack_gpu(tmp_path, *flags, OUT=str(returned))
        assert ran.returncode == 0, ran.stderr
        (row,) = (row for row in json.loads(path.read_text())["rows"] if row["kind"] == "copy")
        assert (returned / path.name).read_text() == path.read_text()
        return float(row["gigabytes_per_second"])

    copy_rate("--stage", "copy")
    document = json.loads(path.read_text())
    document["rows"][0]["gigabytes_per_second"] = 0.125
    path.write_text(json.dumps(document))
    assert copy_rate("--stage", "sampling") == 0.125
    stages = {stage["name"]: stage["status"] for stage in json.loads(path.read_text())["stages"]}
    assert stages == {"copy": "done", "sampling": "done"}
    assert copy_rate("--stage", "copy") != 0.125, "it was asked for"
    document["machine"]["sources"] = "other code"
    path.write_text(json.dumps(document))
    assert copy_rate("--stage", "sampling") != 0.125


def test_rows_of_a_stage_for_which_no_time_is_left_again_stay(tmp_path: Path) -> None:
    assert hack_gpu(tmp_path, "--stage", "copy").returncode == 0
    path = tmp_path / "dry-run.json"
    document = json.loads(path.read_text())
    document["stages"][0]["status"] = "out of time"
    path.write_text(json.dumps(document))
    assert hack_gpu(tmp_path, "--seconds", "0", "--stage", "sampling").returncode == 1
    after = json.loads(path.read_text())
    assert [stage["status"] for stage in after["stages"]] == ["out of time", "no time was left"]
    assert after["rows"] == document["rows"]


def test_the_stages_of_a_part_fit_into_a_run() -> None:
    import stages

    assert len(stages.PARTS) == 3
    for part in stages.PARTS:
        assert sum(stage.budget_seconds for stage in part) <= stages.SECONDS < 600


def test_an_error_of_one_layer_does_not_count_as_one_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token may choose another expert there, by rounding. A wrong product is wrong in all layers."""
    import harness
    import torch
    from networks import random_target
    from shapes import TINY
    from stages.steps import MOST_PRODUCTS_ERROR

    fuse = harness.fuse

    def error(layers: tuple[int, ...]) -> float:
        def fuse_wrongly(model: Any) -> None:
            fuse(model)
            for layer in layers:
                model.model.layers[layer].mlp.down_proj.weight.neg_()

        monkeypatch.setattr(harness, "fuse", fuse_wrongly)
        found: float = harness.products_error(random_target(TINY, torch.float32, torch.device("cpu")))
        return found

    assert error(()) < 1e-5
    assert error((1,)) < 1e-5
    assert error((0, 1, 2)) > MOST_PRODUCTS_ERROR


STEP = {
    "stage": "engine-8b",
    "kind": "step",
    "batch": 1,
    "context": 8192,
    "shape": "plain",
    "synthetic": False,
    "step_milliseconds": 5.0,
}
SHORT = STEP | {"context": 128}


FLOOR = "P1 plain step over its floor, batch 1, short"
CHAIN = "P2 chain:5 at 3.52 tokens a step, tokens/s"


@pytest.mark.parametrize(
    ("row", "target", "met"),
    [
        ({"over_roofline": 1.10}, FLOOR, True),
        ({"over_roofline": 1.11}, FLOOR, False),
        ({"shape": "chain:5", "step_milliseconds": 5.0, "tokens_per_second_at_3_52": 704.0}, CHAIN, True),
        ({"shape": "chain:5", "step_milliseconds": 5.1, "tokens_per_second_at_3_52": 690.2}, CHAIN, False),
    ],
)
def test_target_is_met_or_missed(row: dict[str, Any], target: str, met: bool) -> None:
    verdicts = judge([SHORT | row, STEP])
    assert verdicts[target, "batch 1, 128 tokens"] is met
    assert verdicts["plain step over its roofline, 8k", "not measured"] is None


def test_step_of_another_stage_meets_no_target() -> None:
    verdicts = judge([STEP | {"stage": "engine-8b-eager", "over_roofline": 1.0}])
    assert set(verdicts.values()) == {None}


def test_figure_without_a_goal_is_reported() -> None:
    row = {"stage": "texts", "kind": "texts", "case": "chain:3", "temperature": 0.0, "share_differing": 0.25}
    import targets

    measured = [verdict for verdict in targets.judge([row]) if verdict.measured is not None]
    assert [(verdict.case, verdict.measured, verdict.met) for verdict in measured] == [
        ("chain:3, temperature 0", 0.25, None)
    ]


def test_sampling_is_a_share_of_the_smallest_and_largest_plain_step() -> None:
    sampled = [
        {"stage": "sampling", "kind": "sampling", "rows": count, "choice_microseconds": took}
        | {"cut_choice_microseconds": 2 * took}
        for count, took in ((1, 290.0), (64, 310.0))
    ]
    rows = [*sampled, SHORT | {"step_milliseconds": 10.0}]
    rows += [{**STEP, "batch": batch, "step_milliseconds": 10.0} for batch in (1, 8, 64)]
    verdicts = judge(rows)
    share, with_cuts = "P5 sampling, share of a plain step", "P5 sampling with top-k and top-p, share of a plain step"
    assert verdicts[share, "batch 1, 128 tokens"] is True
    assert verdicts[share, "batch 64, 8192 tokens"] is False
    assert verdicts[with_cuts, "batch 1, 128 tokens"] is False
    assert (share, "batch 8, 8192 tokens") not in verdicts


def test_attention_is_compared_with_the_available_baseline() -> None:
    """Attention is compared with FlashInfer's decode if it is installed, else with the rate of reading."""
    case = {"stage": "attention", "batch": 1, "context": 8192, "nodes": 6}
    ours = case | {"kind": "attention", "microseconds": 10.0, "share_of_copy_rate": 0.5, "over_prefix_pass": 1.2}
    rows = [ours | {"flash_decode_microseconds": 9.5}]
    verdicts = judge(rows)
    name = "batch 1, 8192 tokens, 6 nodes"
    assert verdicts["tree attention over FlashInfer's unmasked decode", name] is True
    assert verdicts["tree attention, share of the copy rate (no FlashInfer)", "not measured"] is None
    assert verdicts["P4 tree of 6 nodes over the prefix pass", name] is False
    rows[0]["flash_decode_microseconds"] = None
    assert judge(rows)["tree attention, share of the copy rate (no FlashInfer)", name] is False


def test_the_estimate_reads_all_weights_of_a_rank_once_and_is_near_what_was_measured() -> None:
    import roofline

    gpu, model = roofline.Gpu(1e12, 1e18), roofline.LLAMA_70B
    whole, four, fp8 = (roofline.Dense(model, *split) for split in ((), (4,), (2, 1)))
    floor = whole.floor_seconds(gpu, 1, 0, 1, 0)
    assert floor == pytest.approx(2 * (70.55e9 - 128_256 * 8192) / 1e12, rel=0.001), "all but the embedding table"
    assert four.floor_seconds(gpu, 1, 0, 1, 0) == pytest.approx(floor / 4)
    assert fp8.floor_seconds(gpu, 1, 0, 1, 0) == pytest.approx(floor / 4, rel=0.02), "and a table in bf16"
    assert four.step_seconds(gpu, "plain", 1, 0) - floor / 4 == pytest.approx(1e-6 * (3.1 * 730 + 12 * 162))
    after = roofline._steps_of(roofline.RESULTS / roofline.MEASURED[1])
    for shape in ("plain", "chain:5"):
        estimate = 1e3 * roofline.ONE.step_seconds(roofline.GPUS["H200"], shape, 1, 128)
        assert estimate == pytest.approx(after[shape, 1, 128], rel=0.05)
    assert sum(line.count("|") == 12 for line in roofline.steps_table(gpu)) == 2 + 3 * 3 * 3 * 2


def test_the_computed_maverick_has_its_published_size() -> None:
    """400 billion weights, 17 of them for a token; all bytes of a plain step are read once by the eight ranks."""
    import roofline

    model = roofline.MAVERICK
    layers, table = model.moe_layers * roofline._EXPERT, roofline.VOCABULARY * roofline.HIDDEN
    assert model.whole + model.experts * layers + 2 * table == pytest.approx(400e9, rel=0.005)
    assert model.whole + layers + 2 * table == pytest.approx(17.2e9, rel=0.005)
    step = roofline.rank_step(roofline.Gpu(1e12, 1e15), model, 0)
    assert step.bytes == pytest.approx(1e3 * (model.whole + layers + 2 * table) / 8 / 1e12)
    scout = roofline.SCOUT
    assert scout.whole + scout.experts * 48 * roofline._EXPERT + 2 * table == pytest.approx(107.8e9, rel=0.005)


def test_the_simulator_has_the_computed_steps_of_llama4() -> None:
    """A plain step of one row is that of the roofline, and more rows read the experts that they choose."""
    import roofline

    document = json.loads((ROOT / "benchmarks/recordings/steps-composed.json").read_text())
    gpu, tables = roofline.GPUS["H200"], published(document)
    for model, name in ((roofline.SCOUT, "h200-scout"), (roofline.MAVERICK, "8-h200-maverick")):
        assert document["devices"][name] == roofline.step_figures(gpu, model)
        step, seconds = roofline.rank_step(gpu, model, 0), tables[name].seconds
        assert 1e3 * seconds(1, 1, 0, 0) == pytest.approx(step.bytes + step.launches + step.collectives, rel=0.01)
        drafted = roofline.rank_step(gpu, model, 3)
        whole = drafted.bytes + drafted.launches + drafted.collectives
        assert 1e3 * seconds(1, 4, 3, 0) == pytest.approx(whole, rel=0.01)
