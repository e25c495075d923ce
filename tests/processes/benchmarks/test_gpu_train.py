"""Page and pieces of a draft that was trained on a GPU."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "gpu_train.py"


def judged(code: float, prose: float) -> dict[str, Any]:
    domains = {"code": {"tokens_per_step": code}, "prose": {"tokens_per_step": prose}}
    return {"runs": [{"overall": {"tokens_per_step": (code + prose) / 2}, "domains": domains}]}


def test_page_compares_domains_and_pieces_make_the_draft_again(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    (run / "head").mkdir(parents=True)
    out.mkdir()
    (out / "draft.tar.9").write_bytes(b"of an earlier run")
    (run / "head" / "model.safetensors").write_bytes(bytes(range(256)) * 70_000)
    (run / "before.json").write_text(json.dumps(judged(2.0, 1.8)))
    (run / "after.json").write_text(json.dumps(judged(2.5, 1.75)))
    (run / "history.json").write_text("[]")
    words = [sys.executable, PROGRAM, "--run", run, "--from", "embedded://head", "--out", out]
    subprocess.run(words, check=True, capture_output=True, env={"SPECDECODE_COMMIT": "0123456789abcdef"})
    page = (out / "gpu-train.md").read_text()
    assert "| code | 2.00 | 2.50 |\n| prose | 1.80 | 1.75 |\n| all | 1.90 | 2.12 |" in page
    assert "embedded://head, commit 0123456789ab" in page
    pieces = sorted(out.glob("draft.tar.*"))
    assert [piece.name for piece in pieces] == ["draft.tar.0", "draft.tar.1"]
    assert max(piece.stat().st_size for piece in pieces) <= 15_000_000
    with tarfile.open(fileobj=io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))) as tar:
        weights = tar.extractfile("head/model.safetensors")
        assert weights is not None
        assert weights.read() == (run / "head" / "model.safetensors").read_bytes()
