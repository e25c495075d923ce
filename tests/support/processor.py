"""What this machine's processor is good at."""

from __future__ import annotations

from specdecode_kernels.cpu.native import cpu_flags

MULTIPLIES_BF16 = not cpu_flags() or "avx512_bf16" in cpu_flags()
"""Whether the processor has instructions for bfloat16. Where none can be asked, it does."""
FASTEST_DTYPE = "bfloat16" if MULTIPLIES_BF16 else "float32"
"""The dtype with the fastest steps. In it, a row's numbers do not depend on the batch."""
