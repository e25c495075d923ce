"""What a recording says about where and when it was made."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def described() -> dict[str, Any]:
    """Machine (no host name), threads and date."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    flags = next((line for line in lines if line.startswith("flags")), "")
    wanted = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags.split()]
    return {
        "machine": f"{model} ({wanted[0] if wanted else 'no vector units'})",
        "threads": torch.get_num_threads(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
