"""Attention of a prompt chunk in every way: our kernel, and those of `tree_attention/prefill.py` with their copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attention import PAGE, Layer
from timing import DEVICE, seconds
from torch import Tensor

from specdecode_kernels.tree_attention import kernel, prefill
from specdecode_kernels.tree_attention.plan import plan

LAYERS = (Layer(), Layer(heads=8, kv=1))
"""Llama-3.1-8B, and one rank's eighth of Llama-3.1-70B."""
LAYERS_OF_A_MODEL = 8
"""Caches that take turns, so that no layer finds its keys in the L2 cache."""
SIZES = ((512, 512), (2048, 2048), (2048, 8192))
"""(queries, keys): chunks of a step of 2,048 tokens, at the end of prompts of 512, 2k and 8k tokens."""


def measure(layer: Layer, queries: int, keys: int) -> dict[str, Any]:
    """Return the microseconds of a chunk by way. A way that fails is left out and named in ``problems``."""
    columns = -(-keys // PAGE)
    made = {"device": DEVICE, "dtype": layer.dtype}
    q_THD = torch.randn(queries, layer.heads, layer.size, **made)
    caches = [torch.randn(2, columns + 1, PAGE, layer.kv, layer.size, **made) for _ in range(LAYERS_OF_A_MODEL)]
    table_BM = torch.randperm(columns, device=DEVICE)[None] + 1
    ours = plan(
        query_start=torch.tensor([0, queries], device=DEVICE),
        prefix_len_B=torch.tensor([keys - queries], device=DEVICE),
        key_start_B=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        ancestors_T=torch.zeros(queries, dtype=torch.int64, device=DEVICE),
        block_table_BM=table_BM,
        block_size=PAGE,
        groups=layer.heads // layer.kv,
        kv_heads=layer.kv,
    )
    calls: dict[str, Callable[[Tensor], object]] = {prefill.OURS: lambda cache: kernel.attend(q_THD, cache, ours)}
    for name in prefill.WAYS:
        chunk = prefill.last_chunks((keys,), (queries,), table_BM, PAGE, lambda *_, name=name: name)[0]
        calls[name] = lambda cache, chunk=chunk: prefill.attend(q_THD, cache, chunk)
    ways: dict[str, float] = {}
    problems: dict[str, str] = {}
    for name, call in calls.items():
        try:
            ways[name] = 1e6 * seconds(*(partial(call, cache) for cache in caches))
        except Exception as error:
            problems[name] = repr(error)[:300]
    return {
        "heads": layer.heads,
        "kv_heads": layer.kv,
        "head_dim": layer.size,
        "queries": queries,
        "keys": keys,
        "ways": ways,
        "problems": problems,
    }
