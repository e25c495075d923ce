"""Tables of step times: recorded cells come back, measured steps come out, and nothing leaves the grid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdecode_simulator.records.recordings import Library
from specdecode_worker.contract import TreeShape


def test_recorded_cells_come_back(library: Library, recordings: Path) -> None:
    document = json.loads((recordings / "steps-smollm2-cpu.json").read_text())
    table = library.tables["smollm2-cpu"]
    for cell in document["cells"]:
        if cell["context"] == 128:
            b, d = cell["sequences"], cell["depth"]
            assert table.seconds(b, b * (d + 1), d, b * 128) == pytest.approx(cell["seconds"])


def test_measured_steps_of_a_gpu_come_out_within_the_error_of_the_fit(library: Library, recordings: Path) -> None:
    measured = json.loads((recordings.parent / "results" / "gpu-h200-2026-11-27-third.json").read_text())["rows"]
    steps = [row for row in measured if row["kind"] == "step" and row["graphs"] and not row["draft_quantization"]]
    assert {row["shape"] for row in steps} == {"plain", "chain:3", "chain:5", "tree:4,2,1"}
    for row in steps:
        shape, batch = TreeShape.parse(row["shape"].replace("plain", "none")), row["batch"]
        found = library.tables["h200-8b"].seconds(batch, batch * (1 + shape.nodes), shape.depth, batch * row["context"])
        assert 1000 * found == pytest.approx(row["step_milliseconds"], rel=0.12), row["shape"]


def test_wider_trees_cost_more_and_as_many_passes(library: Library) -> None:
    for table in library.tables.values():
        seconds = [table.seconds(4, 4 * (1 + nodes), 3, 800) for nodes in (6, 7, 9, 11, 16, 30)]
        assert seconds == sorted(seconds)
        for nodes in (5, 16):
            more = table.seconds(4, 4 * (1 + nodes), 3, 800) - table.seconds(4, 4 * (1 + nodes), 2, 800)
            assert more == pytest.approx(table.pass_seconds[2])


def test_more_passes_than_the_shape_cost_more(library: Library) -> None:
    for table in library.tables.values():
        assert table.seconds(4, 4, 5, 800) > table.seconds(4, 4, 0, 800)


def test_noise_has_a_mean_of_one(library: Library) -> None:
    for table in library.tables.values():
        count = len(table.noise)
        means = [table.noisy(offset, 64)[0] for offset in range(count)]
        assert sum(means) / count == pytest.approx(1.0, abs=0.02)
        assert table.noisy(0, 64)[1] >= table.noisy(0, 64)[0] ** 2
