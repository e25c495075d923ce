"""Flags of `specdecode-worker serve` for the workers of the fault tests."""

from __future__ import annotations

from support.processor import FASTEST_DTYPE

SMALL_FLAGS = ("--dtype", "float32", "--max-num-seqs", "4", "--kv-cache-tokens", "4096", "--served-model-name", "small")
EMBEDDED_FLAGS = (
    *("--model", "embedded://smollm2-135m-instruct", "--served-model-name", "smollm2"),
    *("--dtype", FASTEST_DTYPE),
    *("--max-num-seqs", "4", "--kv-cache-tokens", "32768", "--max-num-batched-tokens", "512"),
)
