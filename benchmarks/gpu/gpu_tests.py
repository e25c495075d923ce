"""tests/gpu in processes of their own, each with a part of the tests. What they had said when time was over counts."""

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
_NOTHING_COLLECTED = 5
"""Exit code of pytest for a part without a test."""


def run_tests(log: Path, seconds: float, *, processes: int, dry: bool) -> dict[str, Any]:
    """A stage's entry with counts, and the names of what failed. The repository's own settings want plugins that are
    not everywhere, so that these are used: none."""
    if importlib.util.find_spec("pytest") is None:
        return {"name": "tests", "status": "pytest is not installed: make gpu-carry", "seconds": 0.0}
    settings = log.with_name("pytest-gpu.ini")
    settings.write_text(_SETTINGS)
    began = time.monotonic()
    print(f"==> tests/gpu in {processes} processes, {seconds:.0f} s at most", file=sys.stderr, flush=True)
    logs = [log.with_name(f"{log.stem}-{part}.log") for part in range(processes)]
    started = [_start(out, settings, f"{part}/{processes}") for part, out in enumerate(logs)]
    codes = [_wait(one, began + seconds - time.monotonic()) for one in started]
    text = "".join(out.read_text(errors="replace") for out in logs)
    log.write_text(text)
    for out in logs:
        out.unlink()
    ended = _ENDED.findall(text)
    counts = {word.lower(): sum(how == word for _, how in ended) for word in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    entry = {"name": "tests", "status": _status(codes, counts, dry=dry), "seconds": time.monotonic() - began, **counts}
    entry["names"] = [name for name, how in ended if how in ("FAILED", "ERROR")][:40]
    print(f"    {entry['status']}: {counts}", file=sys.stderr, flush=True)
    return entry


def _start(log: Path, settings: Path, part: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-c", str(settings), f"--rootdir={_ROOT}", str(_ROOT / "tests" / "gpu")]
    environment = dict(
        os.environ,
        TRITON_INTERPRET="0",
        PYTHONPATH=os.pathsep.join(filter(None, (str(_ROOT / "tests"), os.environ.get("PYTHONPATH")))),
        PYTHONUNBUFFERED="1",
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
        SPECDECODE_TESTS_PART=part,
    )
    with log.open("w") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=_ROOT)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code; None of a process that was out of time, which is ended."""
    try:
        return process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def _status(codes: list[int | None], counts: dict[str, int], *, dry: bool) -> str:
    if any(code not in (0, None, _NOTHING_COLLECTED) for code in codes):
        return "failed"
    if None in codes:
        return "out of time"
    return "done" if dry or counts["passed"] else "nothing ran"
