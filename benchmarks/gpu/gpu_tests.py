"""tests/gpu in a process of its own. What it had said when its time was over still counts."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_ENDED = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
_SETTINGS = "[pytest]\naddopts = --import-mode=importlib\n"


def run_tests(log: Path, seconds: float, *, dry: bool) -> dict[str, Any]:
    """A stage's entry with counts, and the names of what failed. The repository's own settings want plugins that are
    not everywhere, so that these are used: none."""
    if importlib.util.find_spec("pytest") is None:
        return {"name": "tests", "status": "pytest is not installed: make gpu-carry", "seconds": 0.0}
    settings = log.with_name("pytest-gpu.ini")
    settings.write_text(_SETTINGS)
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-c", str(settings), f"--rootdir={_ROOT}", str(_ROOT / "tests" / "gpu")]
    began = time.monotonic()
    print(f"==> tests/gpu, {seconds:.0f} s at most", file=sys.stderr, flush=True)
    with log.open("w") as out:
        environment = dict(os.environ, TRITON_INTERPRET="0", PYTHONUNBUFFERED="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
        try:
            ran = subprocess.run(command, stdout=out, stderr=out, timeout=seconds, env=environment, cwd=_ROOT)
            status = "done" if ran.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "out of time"
    ended = _ENDED.findall(log.read_text())
    counts = {word.lower(): sum(how == word for _, how in ended) for word in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    if status == "done" and not counts["passed"] and not dry:
        status = "nothing ran"
    failed = [name for name, how in ended if how in ("FAILED", "ERROR")]
    entry = {"name": "tests", "status": status, "seconds": time.monotonic() - began, **counts, "names": failed[:40]}
    print(f"    {status}: {counts}", file=sys.stderr, flush=True)
    return entry
