"""What this machine's processor is good at."""

from __future__ import annotations

from pathlib import Path


def _multiplies_bf16() -> bool:
    """Return whether the processor has instructions for bfloat16. Where none can be asked, it does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return True
    flags = next((line for line in lines if line.startswith("flags")), "")
    return "avx512_bf16" in flags.split()


MULTIPLIES_BF16 = _multiplies_bf16()
FASTEST_DTYPE = "bfloat16" if MULTIPLIES_BF16 else "float32"
"""The dtype with the fastest steps. In it, a row's numbers do not depend on the batch."""
