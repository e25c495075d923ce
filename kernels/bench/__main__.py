"""`python kernels/bench`: kernel throughput relative to the copy rate of this GPU, as one JSON document.

`make gpu` runs this and benchmarks of whole engine steps.
"""

from __future__ import annotations

import json
import sys

import attention
import quantised
import sampling
import torch
import triton
from timing import copy_rate


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit(
            "kernels/bench needs a GPU; python3 -c 'import torch; print(torch.cuda.is_available())' says no"
        )
    rate = copy_rate()
    cases = [
        (batch, context, masks)
        for batch in (1, 8, 64)
        for context in (1024, 8192)
        for masks in (attention.ONE, attention.CHAIN)
    ]
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gigabytes_per_second": rate / 1e9,
        "attention": [_attention(*sizes, rate) for sizes in cases],
        "sampling": [sampling.measure(rows, rate) for rows in (1, 64, 384)],
        "quantised": [
            row
            for name, sizes in quantised.MATRICES.items()
            for row in quantised.measure(name, *sizes, rate, torch.bfloat16)
        ],
    }
    json.dump(report, sys.stdout, indent=1)
    print()


def _attention(batch: int, context: int, masks: list[int], rate: float) -> dict[str, object]:
    given = attention.case(batch, context, masks, attention.Layer())
    return attention.measure(given, rate) | {"flex_microseconds": attention.measure_flex(given)}


if __name__ == "__main__":
    main()
