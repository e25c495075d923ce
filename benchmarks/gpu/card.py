"""Where and when figures were made: GPU, driver, versions, commit."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).parents[2]
_MEASURED = ("benchmarks/gpu", "kernels", "worker", "tests/gpu")
"""Folders with the code that figures depend on."""


def described(dry: bool) -> dict[str, Any]:
    """Raises SystemExit where a GPU is needed and none is there. A dry run has a stand-in (stand_in.py)."""
    if not dry and not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU here. Run this on a machine with one, or hack/gpu --dry-run.")
    name = torch.cuda.get_device_name()
    return {
        "gpu": name,
        "short_name": (re.findall(r"[A-Z]+\d+\w*", name) or ["gpu"])[0].lower(),
        "memory_gigabytes": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
        "triton": _triton(),
        "python": platform.python_version(),
        "commit": os.environ.get("SPECDECODE_COMMIT", "unknown"),
        "sources": _sources(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def clocks() -> dict[str, str]:
    """Return the clocks, power and temperature at this moment, as the driver gives them."""
    asked = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    said = _said("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader").split(", ")
    return dict(zip(asked.split(","), said, strict=False))


def _sources() -> str:
    """Return a hash of the code that is measured, which may differ from that of the commit."""
    paths = [path for folder in _MEASURED for path in sorted((_ROOT / folder).rglob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split("\n")[0].strip()
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
