"""What a recording says about where and when it was made."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import torch

from specdecode_kernels.cpu.native import cpu_flags, cpu_name


def described() -> dict[str, Any]:
    """Machine (no host name), threads and date."""
    wanted = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in cpu_flags()]
    return {
        "machine": f"{cpu_name()} ({wanted[0] if wanted else 'no vector units'})",
        "threads": torch.get_num_threads(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
