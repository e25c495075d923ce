"""Tests that `make gpu` needs no more packages than docs/dev/testing.md names.

A machine with a GPU may have no others.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
ON_THE_MACHINE = {"torch", "triton", "tokenizers", "safetensors", "numpy"}
CARRIED = set(re.findall(r"packages=\((.*?)\)", (ROOT / "hack" / "gpu-carry").read_text(), re.DOTALL)[0].split())
COLLECT = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *{arguments!r}]))
"""


def absent_modules(present: set[str]) -> set[str]:
    """Return the installed modules that neither ``present`` nor anything that it requires brings."""
    known, todo = set[str](), [canonicalize_name(name) for name in present]
    while todo:
        name = todo.pop()
        if name not in known:
            known.add(name)
            todo += requirements(name)
    owners = packages_distributions()
    return {
        module
        for module, names in owners.items()
        if not known.intersection(map(canonicalize_name, names)) and not module.startswith("_")
    }


def requirements(name: str) -> list[str]:
    try:
        lines = requires(name) or []
    except PackageNotFoundError:
        return []
    needed = (Requirement(line) for line in lines)
    return [canonicalize_name(one.name) for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]


def collected(absent: set[str], folder: Path) -> subprocess.CompletedProcess[str]:
    settings = folder / "pytest.ini"
    settings.write_text("[pytest]\n")
    code = COLLECT.format(absent=absent, arguments=["-c", str(settings), "--rootdir", str(ROOT), "tests/gpu"])
    paths = os.pathsep.join(str(ROOT / part) for part in ("worker", "kernels"))
    environment = dict(os.environ, PYTHONPATH=paths, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", TRITON_INTERPRET="0")
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )


def test_gpu_tests_import_what_the_machine_has(tmp_path: Path) -> None:
    absent = absent_modules(ON_THE_MACHINE | CARRIED) - {"specdecode_worker", "specdecode_kernels"}
    assert {"httpx", "kubernetes", "fastapi", "transformers"} <= absent
    done = collected(absent, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


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
        assert weights.read() == (run / "head" / "model.safetensors").read_bytes()
