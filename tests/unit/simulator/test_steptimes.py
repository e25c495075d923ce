"""Tables of step times: recorded cells come back, published figures come out, and nothing leaves the grid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdecode_simulator.records.recordings import Library


def test_recorded_cells_come_back(library: Library, recordings: Path) -> None:
    document = json.loads((recordings / "steps-smollm2-cpu.json").read_text())
    table = library.tables["smollm2-cpu"]
    for cell in document["cells"]:
        if cell["context"] == 128:
            b, d = cell["sequences"], cell["depth"]
            assert table.seconds(b, b * (d + 1), d, b * 128) == pytest.approx(cell["seconds"])


@pytest.mark.parametrize(("depth", "milliseconds"), [(0, 5.3), (3, 7.2), (5, 7.9), (7, 8.6)])
def test_published_steps_come_out_as_published(library: Library, depth: int, milliseconds: float) -> None:
    found = library.tables["h200-8b"].seconds(1, depth + 1, depth, 200)
    assert 1000 * found == pytest.approx(milliseconds, rel=0.03)


def test_more_passes_than_the_shape_cost_more(library: Library) -> None:
    for table in library.tables.values():
        assert table.seconds(4, 4, 5, 800) > table.seconds(4, 4, 0, 800)


def test_noise_has_a_mean_of_one(library: Library) -> None:
    for table in library.tables.values():
        count = len(table.noise)
        means = [table.noisy(offset, 64)[0] for offset in range(count)]
        assert sum(means) / count == pytest.approx(1.0, abs=0.02)
        assert table.noisy(0, 64)[1] >= table.noisy(0, 64)[0] ** 2
