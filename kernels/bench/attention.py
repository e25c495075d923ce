"""Tree attention of a Llama-3.1-8B layer against the copy rate, and beside FlexAttention with the same mask."""

from __future__ import annotations

from typing import Any

import torch
from timing import seconds
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from specdecode_kernels.tree_attention import kernel
from specdecode_kernels.tree_attention.plan import plan

HEADS, KV, SIZE, PAGE = 32, 8, 128, 16
CHAIN = [(2 << node) - 1 for node in range(6)]


def measure(batch: int, context: int, masks: list[int], rate: float, *, flex: bool) -> dict[str, Any]:
    """One layer over ``batch`` texts of ``context`` tokens and a tree of ``masks`` each."""
    nodes, keys = len(masks), context + len(masks)
    columns = -(-keys // PAGE)
    cache = torch.randn(2, batch * columns + 1, PAGE, KV, SIZE, device="cuda", dtype=torch.bfloat16)
    q_THD = torch.randn(batch * nodes, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    ancestors = torch.tensor(masks, device="cuda")
    made = plan(
        query_start=torch.arange(batch + 1, device="cuda") * nodes,
        prefix_len_B=torch.full((batch,), context, device="cuda"),
        key_start_B=torch.zeros(batch, dtype=torch.int64, device="cuda"),
        ancestors_T=ancestors.repeat(batch),
        block_table_BM=torch.randperm(batch * columns, device="cuda").view(batch, columns) + 1,
        block_size=PAGE,
        groups=HEADS // KV,
        kv_heads=KV,
    )
    moved_bytes = 2 * batch * keys * KV * SIZE * 2 + 2 * q_THD.numel() * 2
    took = seconds(lambda: kernel.attend(q_THD, cache, made))
    found = {
        "batch": batch,
        "context": context,
        "nodes": nodes,
        "microseconds": 1e6 * took,
        "share_of_copy_rate": moved_bytes / took / rate,
    }
    return found | ({"flex_microseconds": 1e6 * _flex(batch, context, ancestors)} if flex else {})


def _flex(batch: int, context: int, ancestors: Tensor) -> float:
    """Contiguous keys: it is spared the paging."""
    nodes = len(ancestors)
    q = torch.randn(batch, HEADS, nodes, SIZE, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, KV, context + nodes, SIZE, device="cuda", dtype=torch.bfloat16).unbind(0)

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key < context) | ((ancestors[query] >> (key - context).clamp(0, 63)) & 1 == 1)

    mask = create_block_mask(seen, None, None, nodes, context + nodes, device="cuda")
    compiled = torch.compile(flex_attention)
    return seconds(lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True))
