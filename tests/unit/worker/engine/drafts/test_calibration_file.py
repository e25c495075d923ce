"""Reader of calibration.json: factors by depth, or an error that names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdecode_worker.drafts.draft_files import Calibration, read_calibration
from specdecode_worker.models.errors import ModelError

MALFORMED = {
    "no-json": "{",
    "text": '{"sharpness": ["x"]}',
    "nested": '{"sharpness":' + "[" * 100_000,
    "infinite": '{"sharpness": [1e999]}',
    "zero": '{"sharpness": [1, 0]}',
    "no-share": '{"sharpness": [1], "agreement": [0.5, 1.5]}',
    "huge": '{"sharpness": [' + "9" * 400 + "]}",
    "large-file": '{"sharpness": [1], "x": "' + "y" * 2**20 + '"}',
}


def test_factors_are_read(tmp_path: Path) -> None:
    assert read_calibration(tmp_path) == Calibration(())
    (tmp_path / "calibration.json").write_text('{"sharpness": [1, 0.5], "tasks": {}}')
    assert read_calibration(tmp_path) == Calibration((1.0, 0.5))
    (tmp_path / "calibration.json").write_text('{"sharpness": [1, 0.5], "agreement": [0.6, 0.5]}')
    assert read_calibration(tmp_path) == Calibration((1.0, 0.5), (0.6, 0.5))


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_file_is_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "calibration.json").write_text(MALFORMED[kind])
    with pytest.raises(ModelError, match=r"calibration\.json should hold"):
        read_calibration(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"calibration\.json should hold.*No such file"):
        read_calibration(tmp_path)
