"""Tests of the packed forward over a paged cache (chunks, single tokens, trees) against one dense pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode_worker.contract import TreeShape
from specdecode_worker.core.device_state import PackedBatch, PagedCache, slots_of, spread
from specdecode_worker.core.kv_cache import BLOCK_SIZE
from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.sampling.trees import Tree, tree_of
from support.worker.dense_attention import dense
from support.worker.small_folders import randomise

CPU = torch.device("cpu")
BLOCKS = 40


@dataclass
class Sequence:
    """One sequence: all of its tokens, the number of them in the cache, and its blocks."""

    tokens: list[int]
    blocks: tuple[int, ...]
    cached: int = 0
    hidden: list[Tensor] = field(default_factory=list)


@pytest.fixture
def target(shape: dict[str, Any]) -> CausalLM:
    model = CausalLM(causal_lm_config(shape)).double().requires_grad_(False)
    randomise(model, 2)
    return model


@pytest.fixture
def cache(target: CausalLM) -> PagedCache:
    config = target.config
    return PagedCache(
        layers=config.num_hidden_layers,
        blocks=BLOCKS,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=torch.float64,
        device=CPU,
    )


def batch(*, scattered: bool) -> list[Sequence]:
    generator = torch.Generator().manual_seed(8)
    order = torch.randperm(BLOCKS - 1, generator=generator) if scattered else torch.arange(BLOCKS - 1)
    lengths = (70, 1, 33, 48)
    return [
        Sequence(
            torch.randint(0, 97, (length,), generator=generator).tolist(),
            tuple((order[9 * b : 9 * b + 9] + 1).tolist()),
        )
        for b, length in enumerate(lengths)
    ]


def packed_of(parts: list[tuple[Sequence, list[int], Tree | None]]) -> PackedBatch:
    """Return the packed batch of one pass: for each sequence a causal run, or the nodes of a tree."""
    counts = tuple(len(tokens) for _, tokens, _ in parts)
    sequence_T, row_T = spread(counts, CPU)
    length_B = torch.tensor([sequence.cached for sequence, *_ in parts])
    table = torch.tensor([sequence.blocks for sequence, *_ in parts])
    depths = [d for _, tokens, tree in parts for d in (tree.depths if tree else range(len(tokens)))]
    masks = [mask for _, tokens, tree in parts for mask in (tree.ancestors if tree else [0] * len(tokens))]
    return PackedBatch(
        tokens_T=torch.tensor([token for _, tokens, _ in parts for token in tokens]),
        positions_T=length_B[sequence_T] + torch.tensor(depths),
        slots_T=slots_of(table, sequence_T, length_B[sequence_T] + row_T),
        prefix_len_B=length_B,
        ancestors_T=torch.tensor(masks),
        block_table_BM=table,
        blocks=tuple(sequence.blocks for sequence, *_ in parts),
        query_counts=counts,
        key_bounds=tuple(sequence.cached + count for (sequence, *_), count in zip(parts, counts, strict=True)),
        key_starts=(0,) * len(parts),
        dense=False,
    )


def run(target: CausalLM, cache: PagedCache, parts: list[tuple[Sequence, list[int], Tree | None]]) -> list[Tensor]:
    """Return the hidden states of each part, in order."""
    packed = packed_of(parts)
    hidden = target(packed.tokens_T, packed.positions_T, cache.attend(packed)).hidden_TE
    return list(hidden.split(packed.query_counts))


def dense_hidden(target: CausalLM, tokens: list[int], dense: Any) -> Tensor:
    return target(torch.tensor(tokens), torch.arange(len(tokens)), dense).hidden_TE


def prefill(target: CausalLM, cache: PagedCache, sequences: list[Sequence], chunks: tuple[int, ...]) -> None:
    """Prefill with cycling chunk sizes, so that a pass mixes lengths and positions."""
    turn = 0
    while waiting := [s for s in sequences if s.cached < len(s.tokens)]:
        parts: list[tuple[Sequence, list[int], Tree | None]] = []
        for sequence in waiting:
            size = chunks[turn % len(chunks)]
            turn += 1
            parts.append((sequence, sequence.tokens[sequence.cached : sequence.cached + size], None))
        for (sequence, tokens, _), hidden in zip(parts, run(target, cache, parts), strict=True):
            sequence.hidden.append(hidden)
            sequence.cached += len(tokens)


@pytest.mark.parametrize("chunks", [(1000,), (1,), (16,), (7, 1, 19, 2)], ids=str)
@pytest.mark.parametrize("scattered", [False, True], ids=["in-place", "scattered"])
def test_chunked_prefill_matches_one_pass(
    target: CausalLM, cache: PagedCache, scattered: bool, chunks: tuple[int, ...]
) -> None:
    sequences = batch(scattered=scattered)
    assert max(len(s.tokens) for s in sequences) > 4 * BLOCK_SIZE
    prefill(target, cache, sequences, chunks)
    for sequence in sequences:
        wanted = dense_hidden(target, sequence.tokens, dense)
        torch.testing.assert_close(torch.cat(sequence.hidden), wanted, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("scattered", [False, True], ids=["in-place", "scattered"])
def test_every_node_attends_to_its_own_path(target: CausalLM, cache: PagedCache, scattered: bool) -> None:
    """In a pass with a tree, a chain, a chunk and a plain token, each node gets the state of its own path."""
    sequences = batch(scattered=scattered)
    prefill(target, cache, sequences[:3], (23,))
    trees = [tree_of(TreeShape.parse(text)) for text in ("tree:3,2,1", "chain:4", "none")]
    generator = torch.Generator().manual_seed(9)
    parts: list[tuple[Sequence, list[int], Tree | None]] = [
        (s, torch.randint(0, 97, (len(tree.parents),), generator=generator).tolist(), tree)
        for s, tree in zip(sequences, trees, strict=False)
    ]
    states = run(target, cache, [*parts, (sequences[3], sequences[3].tokens, None)])
    for (sequence, tokens, tree), hidden in zip(parts, states, strict=False):
        assert tree is not None
        for node in range(len(tokens)):
            path = [tokens[n] for n in range(len(tokens)) if tree.ancestors[node] >> n & 1]
            wanted = dense_hidden(target, sequence.tokens + path, dense)[-1]
            torch.testing.assert_close(hidden[node], wanted, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(states[3], dense_hidden(target, sequences[3].tokens, dense), atol=1e-10, rtol=1e-10)
